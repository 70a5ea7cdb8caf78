#include "thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace paged_kv {
namespace {

struct Job {
  void (*task)(void*, int);
  void* context;
  int count;
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};

  void work() {
    try {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i);
    } catch (const std::bad_alloc&) {
      failed = true;  // thrown again where it can be caught
    }
  }
};

// About 20 microseconds: the last tasks end within that of each other, and sleeping costs as much.
constexpr int SPINS = 500;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) {
      try {
        std::thread([this] { loop(); }).detach();
      } catch (const std::system_error&) {
        break;  // no more threads to be had: the caller does the work of those that are missing
      }
    }
  }

  int threads() const { return threads_; }

  bool run(Job& job) {
    std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
    if (!only) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_++;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // a thread that wakes late finds nothing to do
    lock.unlock();
    for (int i = 0; working_ != 0 && i < SPINS; i++) pause();
    lock.lock();
    done_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned long seen = 0;;) {
      wake_.wait(lock, [&] { return job_ && generation_ != seen; });
      seen = generation_;
      Job* job = job_;
      working_++;
      lock.unlock();
      job->work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  const int threads_;
  std::mutex busy_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  unsigned long generation_ = 0;
  std::atomic<int> working_{0};
};

std::atomic<int> wanted{1};
// Never freed: its threads sleep in it until the process ends.
std::atomic<Pool*> current{nullptr};
std::mutex starting;

// A child has none of its parent's threads, and its copies of locks may be held by one of them.
void forget_parent() {
  current.store(nullptr, std::memory_order_relaxed);
  new (&starting) std::mutex;
}

// Null while another thread starts it.
Pool* pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_parent);
  (void)registered;
  Pool* found = current.load(std::memory_order_acquire);
  if (found && found->threads() == wanted.load()) return found;
  std::unique_lock<std::mutex> lock(starting, std::try_to_lock);
  if (!lock) return nullptr;
  Pool* started = new Pool(wanted.load());
  current.store(started, std::memory_order_release);
  return started;
}

}  // namespace

void use_threads(int count) { wanted.store(count < 1 ? 1 : count); }

int thread_count() { return wanted.load(); }

void parallel_for(int count, void (*task)(void*, int), void* context) {
  Job job{task, context, count};
  Pool* threads = count > 1 && thread_count() > 1 ? pool() : nullptr;
  if (!threads || !threads->run(job)) job.work();
  if (job.failed) throw std::bad_alloc();
}

}  // namespace paged_kv
