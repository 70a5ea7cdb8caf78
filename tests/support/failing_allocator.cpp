// Lets allocations of MLX's CPU allocator fail as those of its GPU allocators do: with an error, in
// the thread that evaluates. By itself it raises none.

#include <pthread.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

// mlx/allocator.h: Allocator's virtual functions begin with `malloc`. Before them, the Itanium C++
// ABI puts the offset to the top of the object, and its type.
constexpr int before = 2, functions = 7;

struct Buffer {
  void* pointer;
};
using Malloc = Buffer (*)(void*, std::size_t);

void* table[before + functions];
Malloc stock = nullptr;
pthread_t armed;
long passing = 0, failing = 0, counted = 0;
std::size_t least = 0, most = 0;

Buffer allocate(void* allocator, std::size_t size) {
  if (failing > 0 && size >= least && size <= most &&
      pthread_equal(pthread_self(), armed)) {
    ++counted;
    if (passing == 0) {
      --failing;
      throw std::runtime_error("[malloc] Unable to allocate " + std::to_string(size) + " bytes.");
    }
    --passing;
  }
  return stock(allocator, size);
}

}  // namespace

// Give the allocator a table of functions in which `malloc` is the one above.
extern "C" void install(void* allocator) {
  void**& functions_of = *static_cast<void***>(allocator);
  if (functions_of == table + before) {
    return;
  }
  std::memcpy(table, functions_of - before, sizeof table);
  stock = reinterpret_cast<Malloc>(table[before]);
  table[before] = reinterpret_cast<void*>(&allocate);
  functions_of = table + before;
}

// From now on `after` allocations of this thread succeed, and `many` fail, of those of `from` to `to`
// bytes.
extern "C" void arm(long after, long many, std::size_t from, std::size_t to) {
  armed = pthread_self();
  passing = after, failing = many, least = from, most = to, counted = 0;
}

extern "C" long allocations() { return counted; }
