// What the preludes and the parts of the runtime share: threads of a grid as fibers of one thread.
//
// No header of a C library is included: the compiler of the ziglang wheel would first have to build
// one. The few functions of it that are needed are found in the process that loads this.
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
void* mmap(void*, size_t, int, int, int, long);
int munmap(void*, size_t);
int madvise(void*, size_t, int);
void* memcpy(void*, const void*, size_t);
void* memmove(void*, const void*, size_t);
void* memset(void*, int, size_t);
int vsnprintf(char*, size_t, const char*, va_list);
}

namespace gpu {

constexpr uint32_t LANES = 32;
constexpr uint32_t MOST_THREADS = 1024;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr size_t SHARED_BYTES = 1 << 20;  // for threadgroup memory and the red zones between
constexpr uint32_t SHARED_VARIABLES = 64;

// What a kernel may ask of its place; the preludes know this layout.
struct Ids {
  uint32_t in_grid[3], in_group[3], group[3], group_size[3], groups[3];
  uint32_t lane, simdgroup, index;
};

enum State { READY, AT_EXCHANGE, AT_BARRIER, DONE };

// Memory of a device and of a threadgroup: flags of barriers are 1 << space.
enum Space { DEVICE, SHARED };

struct Fiber {
  void* stack_pointer;
  char* stack;
  State state;
  uint32_t site, flags, parity;
  // How many barriers for each space this thread has passed, with its threadgroup and with its
  // simdgroup.
  uint32_t barriers[2], simd_barriers[2];
  alignas(16) char deposits[2][64];
  Ids ids;
};

struct Cell;

// An argument of a kernel that is memory.
struct Buffer {
  char* memory;
  uint64_t bytes;
  const char* name;
  uint32_t is_writable, is_written_before;  // by whoever launches
  uint8_t *read, *written;                  // a byte for each LINE of it, or null
  uint32_t* reader;  // of each LINE: 1 + the threadgroup that read it last
  uint64_t loads;    // of lines by threadgroups, each once
  Cell* cells;
};

constexpr uint64_t LINE = 64;

enum Order { FORWARD, REVERSE, SHUFFLED };

struct Options {
  uint32_t order, seed, is_checked, shared_limit;
};

struct Variable {
  uint64_t at, bytes;
};

struct Launch {
  Options options;
  Buffer* buffers;
  uint32_t buffer_count;
  uint32_t group;  // the running one, and a number that no earlier one had
  uint64_t generation;
  Variable variables[SHARED_VARIABLES];
  uint64_t shared_used, shared_asked;
  bool is_over;  // after a fault from which nothing sensible follows
};

extern Launch launch;
extern Fiber* running;
extern Fiber fibers[MOST_THREADS];
extern char* stacks;
extern char* shared_memory;
// What the lanes of each simdgroup have brought to an exchange.
extern const void* lanes_of[MOST_THREADS / LANES][LANES];

// Zeros that cost nothing until they are touched.
void* memory_of(size_t bytes);
// Notes a fault; `pc` is the instruction, 0 if none is known.
void report(uint64_t pc, const char* format, ...);
// Ends the running thread, and the launch.
[[noreturn]] void give_up();
void check_start();
void check_end();

}  // namespace gpu
