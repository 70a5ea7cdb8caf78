// Which instruction sets this machine has, and which one is used.
#include "instruction_sets.h"

#include <string.h>

#include <atomic>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace paged_kv {
namespace {

#if defined(__x86_64__)
// Which registers the system saves: AVX's are bits 1 and 2 of XCR0, AVX-512's 5 to 7 besides.
bool system_saves(unsigned mask) {
  unsigned a, b, c, d;
  constexpr unsigned OSXSAVE = 1u << 27;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

bool has_avx2() {
  unsigned a, b, c, d;
  constexpr unsigned FMA = 1u << 12, F16C = 1u << 29, AVX2 = 1u << 5;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (FMA | F16C)) != (FMA | F16C)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & AVX2) && system_saves(0x06);
}

bool has_avx512() {
  unsigned a, b, c, d;
  constexpr unsigned F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31;
  constexpr unsigned ALL = F | DQ | BW | VL;
  return has_avx2() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & ALL) == ALL &&
         system_saves(0xe6);
}

bool has_avx512_bf16() {
  unsigned a, b, c, d;
  constexpr unsigned BF16 = 1u << 5;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & BF16);
}
#endif

// The one to use first; the others where they are asked for by name.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  if (has_avx512()) found.push_back(&avx512_kernels);
  if (has_avx512_bf16()) found.push_back(&avx512_bf16_kernels);
  if (has_avx2()) found.push_back(&avx2_kernels);
#elif defined(__aarch64__)
  found.push_back(&neon_kernels);
#endif
  found.push_back(&generic_kernels);
  return found;
}

const std::vector<const Kernels*>& all() {
  static const std::vector<const Kernels*> found = usable();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& chosen_kernels() {
  const Kernels* kernels = chosen.load(std::memory_order_relaxed);
  return kernels ? *kernels : *all().front();
}

}  // namespace paged_kv

using namespace paged_kv;

const char* paged_kv_instruction_sets(void) {
  static const std::string names = [] {
    std::string joined;
    for (const Kernels* kernels : all()) joined += (joined.empty() ? "" : ",") + std::string(kernels->name);
    return joined;
  }();
  return names.c_str();
}

int paged_kv_use_instruction_set(const char* name) {
  for (const Kernels* kernels : all())
    if (!strcmp(kernels->name, name)) {
      chosen.store(kernels, std::memory_order_relaxed);
      return PAGED_KV_OK;
    }
  return PAGED_KV_BAD_ARRAY;
}
