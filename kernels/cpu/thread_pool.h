// Threads that sleep between calls.
#pragma once

namespace paged_kv {

// The caller and the threads it wakes run task(context, i) for every i in [0, count), in any
// order. A second caller at the same time runs its tasks alone, as does a pool of one thread.
void parallel_for(int count, void (*task)(void* context, int i), void* context);

void use_threads(int count);
int thread_count();

template <class Function>
void parallel_for(int count, Function& function) {
  parallel_for(
      count, [](void* context, int i) { (*static_cast<Function*>(context))(i); }, &function);
}

}  // namespace paged_kv
