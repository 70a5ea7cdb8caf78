#pragma once

#include "attention.h"

namespace paged_kv {

// The kernels that were chosen, or the best that this machine can run.
const Kernels& chosen_kernels();

}  // namespace paged_kv
