// Runs a grid: the threads of one threadgroup after the other are fibers of the calling thread.
//
// A fiber runs until it meets a barrier or an exchange with the other lanes of its simdgroup. In
// which order fibers, simdgroups and threadgroups run is a choice: what depends on it is a fault.
#include "runtime.h"

// Leaves a fiber: its registers that a call preserves are on its stack.
asm(R"(
.text
.hidden switch_stack
.type switch_stack,@function
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void switch_stack(void** from, void* to);

namespace gpu {

Launch launch;
Fiber* running;
Fiber fibers[MOST_THREADS];
char *stacks, *shared_memory;
const void* lanes_of[MOST_THREADS / LANES][LANES];

namespace {

typedef void (*Kernel)(const uint64_t*);
Kernel kernel;
const uint64_t* arguments;
void* scheduler;
uint64_t random_state;
char faults[16384];
size_t faults_used;
uint32_t fault_count;
// Which were noted: by their text and the instruction.
struct {
  uint64_t pc;
  const char* format;
} noted[64];
uint32_t noted_count;

uint32_t next_random(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>((random_state >> 11) % below);
}

// The numbers below `count` in the launch's order.
void put_in_order(uint32_t* numbers, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    numbers[i] = launch.options.order == REVERSE ? count - 1 - i : i;
  if (launch.options.order != SHUFFLED) return;
  for (uint32_t i = count; i > 1; i--) {
    uint32_t j = next_random(i), other = numbers[i - 1];
    numbers[i - 1] = numbers[j];
    numbers[j] = other;
  }
}

void to_scheduler() { switch_stack(&running->stack_pointer, scheduler); }

void begin() {
  kernel(arguments);
  running->state = DONE;
  to_scheduler();
  __builtin_trap();
}

void prepare_fiber(Fiber& fiber, uint32_t index) {
  fiber.state = READY;
  fiber.parity = 0;
  fiber.stack = stacks + index * STACK_BYTES;
  for (int space = 0; space < 2; space++) fiber.barriers[space] = fiber.simd_barriers[space] = 0;
  // As after a call: the return address lies at 8 modulo 16, below it six saved registers.
  void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 72);
  *top = nullptr;
  *--top = reinterpret_cast<void*>(begin);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
}

void prepare_group(uint32_t number, const uint32_t* groups, const uint32_t* size) {
  launch.group = number;
  launch.generation++;
  memset(shared_memory, 0xff, launch.shared_used);
  const uint32_t group[3] = {number % groups[0], number / groups[0] % groups[1],
                             number / groups[0] / groups[1]};
  uint32_t count = size[0] * size[1] * size[2];
  for (uint32_t index = 0; index < count; index++) {
    prepare_fiber(fibers[index], index);
    Ids& ids = fibers[index].ids;
    const uint32_t in_group[3] = {index % size[0], index / size[0] % size[1],
                                  index / size[0] / size[1]};
    for (int i = 0; i < 3; i++) {
      ids.in_group[i] = in_group[i];
      ids.group[i] = group[i];
      ids.group_size[i] = size[i];
      ids.groups[i] = groups[i];
      ids.in_grid[i] = group[i] * size[i] + in_group[i];
    }
    ids.lane = index % LANES;
    ids.simdgroup = index / LANES;
    ids.index = index;
  }
}

// Lets all lanes of a simdgroup go on that wait for each other; they must all be at one place.
bool release_lanes(uint32_t simdgroup) {
  Fiber* lanes = fibers + simdgroup * LANES;
  uint32_t waiting = 0, first = 0;
  for (uint32_t i = LANES; i-- > 0;)
    if (lanes[i].state == AT_EXCHANGE) waiting++, first = i;
  if (!waiting) return false;
  for (uint32_t i = 0; i < LANES; i++) {
    if (lanes[i].state != AT_EXCHANGE || lanes[i].site != lanes[first].site) {
      report(0, "line %u: an operation of the simdgroup that only part of its lanes reach",
             lanes[first].site);
      launch.is_over = true;
      return false;
    }
    lanes_of[simdgroup][i] = lanes[i].deposits[lanes[i].parity];
    lanes[i].state = READY;
  }
  return true;
}

bool run_ready_lanes(uint32_t simdgroup) {
  uint32_t order[LANES];
  put_in_order(order, LANES);
  bool any = false;
  for (uint32_t lane : order) {
    Fiber& fiber = fibers[simdgroup * LANES + lane];
    if (fiber.state != READY) continue;
    any = true;
    running = &fiber;
    switch_stack(&scheduler, fiber.stack_pointer);
    running = nullptr;
    if (launch.is_over) return false;
  }
  return any;
}

// Until the simdgroup is at a barrier or done, or, shuffled, until another's turn.
bool run_simdgroup(uint32_t simdgroup) {
  bool any = false;
  while (!launch.is_over) {
    bool ran = run_ready_lanes(simdgroup);
    bool released = !launch.is_over && release_lanes(simdgroup);
    any |= ran | released;
    if (!released) break;
    if (launch.options.order == SHUFFLED && next_random(4) == 0) break;
  }
  return any;
}

// Lets a whole threadgroup pass a barrier; false where all are done.
bool release_group(uint32_t count) {
  uint32_t waiting = 0, first = 0;
  for (uint32_t i = count; i-- > 0;)
    if (fibers[i].state == AT_BARRIER) waiting++, first = i;
  if (!waiting) return false;
  for (uint32_t i = 0; i < count; i++) {
    if (fibers[i].state == AT_BARRIER && fibers[i].site == fibers[first].site) continue;
    report(0, "line %u: a barrier that thread %u of threadgroup %u does not reach",
           fibers[first].site, i, launch.group);
    launch.is_over = true;
    return false;
  }
  for (uint32_t i = 0; i < count; i++) {
    fibers[i].state = READY;
    for (int space = 0; space < 2; space++)
      if (fibers[first].flags >> space & 1) fibers[i].barriers[space]++;
  }
  return true;
}

void run_group(uint32_t count) {
  uint32_t order[MOST_THREADS / LANES];
  do {
    for (bool progress = true; progress && !launch.is_over;) {
      progress = false;
      put_in_order(order, count / LANES);
      for (uint32_t i = 0; i < count / LANES; i++) progress |= run_simdgroup(order[i]);
    }
  } while (!launch.is_over && release_group(count));
}

}  // namespace

void* memory_of(size_t bytes) {
  enum { READ_WRITE = 3, PRIVATE = 2, ANONYMOUS = 0x20, NORESERVE = 0x4000 };
  return mmap(nullptr, bytes, READ_WRITE, PRIVATE | ANONYMOUS | NORESERVE, -1, 0);
}

void report(uint64_t pc, const char* format, ...) {
  fault_count++;
  for (uint32_t i = 0; i < noted_count; i++)
    if (noted[i].pc == pc && noted[i].format == format) return;
  if (noted_count < sizeof noted / sizeof *noted) noted[noted_count++] = {pc, format};
  char line[400];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  size_t length = __builtin_strlen(line);
  if (faults_used + length + 32 > sizeof faults) return;
  char prefix[24];
  int digits = 0;
  for (int shift = 60; shift >= 0; shift -= 4) prefix[digits++] = "0123456789abcdef"[pc >> shift & 15];
  prefix[digits++] = ' ';
  memcpy(faults + faults_used, prefix, digits);
  memcpy(faults + faults_used + digits, line, length);
  faults_used += digits + length;
  faults[faults_used++] = '\n';
  faults[faults_used] = 0;
}

void give_up() {
  launch.is_over = true;
  to_scheduler();
  __builtin_trap();
}

}  // namespace gpu

using namespace gpu;

EXPORT const Ids* gpu_ids() { return &running->ids; }

EXPORT void gpu_barrier(uint32_t flags, uint32_t site) {
  running->state = AT_BARRIER;
  running->site = site;
  running->flags = flags;
  to_scheduler();
}

// What all lanes have brought, by lane.
EXPORT const void* const* gpu_exchange(const void* value, uint32_t bytes, uint32_t site) {
  running->parity ^= 1;
  memcpy(running->deposits[running->parity], value, bytes);
  running->state = AT_EXCHANGE;
  running->site = site;
  to_scheduler();
  return lanes_of[running->ids.simdgroup];
}

EXPORT void gpu_simd_barrier(uint32_t flags, uint32_t site) {
  gpu_exchange(&flags, sizeof flags, site);
  for (int space = 0; space < 2; space++)
    if (flags >> space & 1) running->simd_barriers[space]++;
}

// Threadgroup memory: the same for all threads of a group that ask for the same variable.
EXPORT void* gpu_shared(uint32_t number, uint64_t bytes) {
  constexpr uint64_t RED_ZONE = 64;
  Variable& variable = launch.variables[number];
  if (!variable.bytes) {
    variable = {launch.shared_used, bytes};
    launch.shared_asked += (bytes + 15) / 16 * 16;
    launch.shared_used += (bytes + 63) / 64 * 64 + RED_ZONE;
    if (launch.shared_asked > launch.options.shared_limit || launch.shared_used > SHARED_BYTES) {
      report(0, "%llu bytes of threadgroup memory, of at most %u",
             static_cast<unsigned long long>(launch.shared_asked), launch.options.shared_limit);
      give_up();
    }
    memset(shared_memory + variable.at, 0xff, bytes);
  }
  return shared_memory + variable.at;
}

// Runs a kernel on a whole grid; returns how many faults were found.
EXPORT int gpu_launch(void (*entry)(const uint64_t*), const uint64_t* args, const uint32_t* groups,
                      const uint32_t* group_size, const Options* options, Buffer* buffers,
                      uint32_t buffer_count) {
  if (!stacks) stacks = static_cast<char*>(memory_of(STACK_BYTES * MOST_THREADS));
  if (!shared_memory) shared_memory = static_cast<char*>(memory_of(SHARED_BYTES));
  kernel = entry;
  arguments = args;
  uint64_t generation = launch.generation;
  launch = {};
  launch.generation = generation;
  launch.options = *options;
  launch.buffers = buffers;
  launch.buffer_count = buffer_count;
  launch.shared_used = 64;
  random_state = 88172645463325252ull ^ (static_cast<uint64_t>(options->seed) << 20);
  faults_used = fault_count = noted_count = 0;
  faults[0] = 0;
  uint32_t count = group_size[0] * group_size[1] * group_size[2];
  uint32_t all = groups[0] * groups[1] * groups[2];
  if (count > MOST_THREADS || count % LANES || !count) {
    report(0, "a threadgroup of %u threads: it must be a multiple of 32 up to 1024", count);
    return 1;
  }
  if (options->is_checked) check_start();
  uint32_t* order = static_cast<uint32_t*>(memory_of(all * sizeof(uint32_t) + 1));
  put_in_order(order, all);
  for (uint32_t i = 0; i < all && !launch.is_over; i++) {
    prepare_group(order[i], groups, group_size);
    run_group(count);
  }
  munmap(order, all * sizeof(uint32_t) + 1);
  if (options->is_checked) check_end();
  return static_cast<int>(fault_count);
}

EXPORT const char* gpu_faults() { return faults; }
