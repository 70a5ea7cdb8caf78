// Looks at every access to memory: the compiler's thread sanitizer calls these functions.
//
// For each two bytes that a kernel may write there is a cell, as no number is smaller: who wrote it
// last, who has read it since, and how many barriers those threads had passed. Two accesses of which one writes are in order if
// one thread makes both, or if a barrier for that memory lies between: of the threadgroup, or of
// the simdgroup for its own lanes. Nothing orders different threadgroups of one launch.
#include "runtime.h"

namespace gpu {

struct Access {
  uint32_t thread;  // 1 + index + 1024 * threadgroup; 0: none
  uint32_t barriers, simd_barriers;
};

constexpr uint64_t CELL_BYTES = 2;

struct Cell {
  uint64_t generation;  // of the threadgroup, for threadgroup memory
  Access writer, reader, other_reader;  // readers of two simdgroups, where two have read
};

namespace {

Cell* shared_cells;

uint64_t cells_of(uint64_t at, uint64_t bytes) {
  return (at + bytes + CELL_BYTES - 1) / CELL_BYTES - at / CELL_BYTES;
}

size_t cell_memory(uint64_t bytes) { return (cells_of(0, bytes) + 1) * sizeof(Cell); }

Access access_now(Space space) {
  return {1 + running->ids.index + MOST_THREADS * launch.group, running->barriers[space],
          running->simd_barriers[space]};
}

bool same_simdgroup(const Access& a, const Access& b) {
  return (a.thread - 1) / LANES == (b.thread - 1) / LANES;
}

bool in_order(const Access& before, const Access& now) {
  if (!before.thread || before.thread == now.thread) return true;
  if ((before.thread - 1) / MOST_THREADS != (now.thread - 1) / MOST_THREADS) return false;
  if (before.barriers != now.barriers) return true;
  return same_simdgroup(before, now) && before.simd_barriers != now.simd_barriers;
}

// Notes an access to a byte; returns the one that it races with.
Access touch(Cell& cell, const Access& now, bool writes) {
  Access rival{};
  if (!in_order(cell.writer, now)) rival = cell.writer;
  if (writes) {
    if (!in_order(cell.reader, now)) rival = cell.reader;
    if (!in_order(cell.other_reader, now)) rival = cell.other_reader;
    cell.writer = now;
    cell.reader = cell.other_reader = {};
    return rival;
  }
  if (cell.reader.thread && !same_simdgroup(cell.reader, now)) cell.other_reader = cell.reader;
  cell.reader = now;
  return rival;
}

const char* verb(bool writes) { return writes ? "write" : "read"; }

// An access to bytes whose cells follow each other.
void touch_all(Cell* cells, uint64_t count, Space space, bool writes, uint64_t pc, const char* name,
               uint64_t at) {
  Access now = access_now(space);
  for (uint64_t i = 0; i < count; i++) {
    Access rival = touch(cells[i], now, writes);
    if (!rival.thread) continue;
    report(pc, "race: %s of '%s' at byte %llu by thread %u of threadgroup %u, and thread %u of %u",
           verb(writes), name, static_cast<unsigned long long>(at + i * CELL_BYTES), running->ids.index,
           launch.group, (rival.thread - 1) % MOST_THREADS, (rival.thread - 1) / MOST_THREADS);
    return;
  }
}

void check_alignment(uint64_t address, uint64_t bytes, uint64_t pc, const char* name, uint64_t at) {
  if (address % bytes == 0) return;
  report(pc, "misaligned: %llu bytes of '%s' at byte %llu", static_cast<unsigned long long>(bytes),
         name, static_cast<unsigned long long>(at));
  give_up();  // this machine may not read it either
}

void access_shared(uint64_t at, uint64_t bytes, bool writes, uint64_t pc, bool aligned) {
  for (uint32_t i = 0; i < SHARED_VARIABLES; i++) {
    const Variable& variable = launch.variables[i];
    if (!variable.bytes || at < variable.at || at + bytes > variable.at + variable.bytes) continue;
    if (aligned) check_alignment(at, bytes, pc, "threadgroup memory", at - variable.at);
    Cell* cells = shared_cells + at / CELL_BYTES;
    uint64_t count = cells_of(at, bytes);
    for (uint64_t k = 0; k < count; k++) {
      if (cells[k].generation == launch.generation) continue;
      cells[k] = {};
      cells[k].generation = launch.generation;
    }
    for (uint64_t k = 0; k < count && !writes; k++) {
      if (cells[k].writer.thread) continue;
      report(pc, "uninitialised: threadgroup variable %u at byte %llu", i,
             static_cast<unsigned long long>(at - variable.at));
      break;
    }
    touch_all(cells, count, SHARED, writes, pc, "threadgroup memory", at - variable.at);
    return;
  }
  report(pc, "out of bounds: %s of threadgroup memory by thread %u", verb(writes),
         running->ids.index);
  give_up();
}

void access_buffer(Buffer& buffer, uint64_t at, uint64_t bytes, bool writes, uint64_t pc) {
  if (writes && !buffer.is_writable) {
    report(pc, "read-only: write of '%s' at byte %llu", buffer.name,
           static_cast<unsigned long long>(at));
    give_up();
  }
  if (uint8_t* lines = writes ? buffer.written : buffer.read)
    for (uint64_t line = at / LINE; line <= (at + bytes - 1) / LINE; line++) {
      lines[line] = 1;
      if (writes || buffer.reader[line] == launch.group + 1) continue;
      buffer.reader[line] = launch.group + 1;
      buffer.loads++;
    }
  if (!buffer.cells) return;
  if (!writes && !buffer.is_written_before && !buffer.cells[at / CELL_BYTES].writer.thread)
    report(pc, "uninitialised: output '%s' at byte %llu is read", buffer.name,
           static_cast<unsigned long long>(at));
  touch_all(buffer.cells + at / CELL_BYTES, cells_of(at, bytes), DEVICE, writes, pc, buffer.name, at);
}

// An access outside all memory that the kernel was given; the nearest buffer before it is named.
void report_stray(uint64_t address, uint64_t bytes, bool writes, uint64_t pc) {
  const Buffer* nearest = nullptr;
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    const Buffer& buffer = launch.buffers[i];
    if (reinterpret_cast<uint64_t>(buffer.memory) > address) continue;
    if (!nearest || nearest->memory < buffer.memory) nearest = &buffer;
  }
  uint64_t at = nearest ? address - reinterpret_cast<uint64_t>(nearest->memory) : address;
  report(pc, "out of bounds: %s of %llu bytes at byte %llu of '%s', by thread %u of threadgroup %u",
         verb(writes), static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(at),
         nearest ? nearest->name : "nothing", running->ids.index, launch.group);
}

bool is_own(uint64_t address, const void* from, uint64_t bytes) {
  return address - reinterpret_cast<uint64_t>(from) < bytes;
}

void access(const void* pointer, uint64_t bytes, bool writes, uint64_t pc, bool aligned) {
  if (!running || !launch.options.is_checked) return;
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (is_own(address, running->stack, STACK_BYTES)) return;
  // The preludes' own: ids, and what lanes exchange.
  if (is_own(address, fibers, sizeof fibers) || is_own(address, lanes_of, sizeof lanes_of)) return;
  if (is_own(address, shared_memory, SHARED_BYTES))
    return access_shared(address - reinterpret_cast<uint64_t>(shared_memory), bytes, writes, pc,
                         aligned);
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer& buffer = launch.buffers[i];
    uint64_t at = address - reinterpret_cast<uint64_t>(buffer.memory);
    if (at >= buffer.bytes || at + bytes > buffer.bytes) continue;
    if (aligned) check_alignment(address, bytes, pc, buffer.name, at);
    return access_buffer(buffer, at, bytes, writes, pc);
  }
  report_stray(address, bytes, writes, pc);
  give_up();
}

}  // namespace

void check_start() {
  if (!shared_cells) shared_cells = static_cast<Cell*>(memory_of(cell_memory(SHARED_BYTES)));
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer& buffer = launch.buffers[i];
    buffer.cells = nullptr;
    if (buffer.is_writable)
      buffer.cells = static_cast<Cell*>(memory_of(cell_memory(buffer.bytes)));
  }
}

void check_end() {
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer& buffer = launch.buffers[i];
    if (!buffer.cells) continue;
    uint64_t missing = 0;
    uint64_t count = buffer.is_written_before || launch.is_over ? 0 : cells_of(0, buffer.bytes);
    for (uint64_t at = 0; at < count; at++)
      missing += CELL_BYTES * !buffer.cells[at].writer.thread;
    if (missing)
      report(0, "unwritten: %llu of %llu bytes of output '%s'",
             static_cast<unsigned long long>(missing),
             static_cast<unsigned long long>(buffer.bytes), buffer.name);
    munmap(buffer.cells, cell_memory(buffer.bytes));
    buffer.cells = nullptr;
  }
}

}  // namespace gpu

using gpu::access;

#define PC (reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1)
#define CALLBACKS(bytes)                                                                       \
  EXPORT void __tsan_read##bytes(void* at) { access(at, bytes, false, PC, true); }             \
  EXPORT void __tsan_write##bytes(void* at) { access(at, bytes, true, PC, true); }             \
  EXPORT void __tsan_unaligned_read##bytes(void* at) { access(at, bytes, false, PC, false); }  \
  EXPORT void __tsan_unaligned_write##bytes(void* at) { access(at, bytes, true, PC, false); }
CALLBACKS(1) CALLBACKS(2) CALLBACKS(4) CALLBACKS(8) CALLBACKS(16)

EXPORT void __tsan_init() {}

EXPORT void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes) access(from, bytes, false, PC, false), access(to, bytes, true, PC, false);
  return memmove(to, from, bytes);
}
EXPORT void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  return __tsan_memcpy(to, from, bytes);
}
EXPORT void* __tsan_memset(void* at, int value, size_t bytes) {
  if (bytes) access(at, bytes, true, PC, false);
  return memset(at, value, bytes);
}

// The undefined behaviour sanitizer's.
#define UNDEFINED(name, text) \
  EXPORT void __ubsan_handle_##name(void*) { \
    if (gpu::running) gpu::report(PC, "undefined: " text); \
  }
UNDEFINED(out_of_bounds, "an index outside its array")
UNDEFINED(shift_out_of_bounds, "a shift by more than the width")
UNDEFINED(divrem_overflow, "a division by zero")
UNDEFINED(add_overflow, "a signed sum that overflows")
UNDEFINED(sub_overflow, "a signed difference that overflows")
UNDEFINED(mul_overflow, "a signed product that overflows")
UNDEFINED(negate_overflow, "a negation that overflows")
UNDEFINED(float_cast_overflow, "a float that no integer of that type holds")
