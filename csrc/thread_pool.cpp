#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <system_error>

namespace tierstream {
namespace {

// Steps of nice(2) below the rest of the process: a tenth of a share of a core that others want too.
constexpr int politeness = 10;

class DefaultFloatEnvironment {
public:
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

private:
    std::fenv_t saved_;
};

// Threads started meanwhile take no signals: those belong to the interpreter's main thread.
class AllSignalsBlocked {
public:
    AllSignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &saved_);
    }
    ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
    AllSignalsBlocked(const AllSignalsBlocked&) = delete;
    AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

private:
    sigset_t saved_;
};

// The pool is never freed: a daemon thread may still be in it while the process exits. fork() copies none of
// the workers and perhaps a locked mutex, so the child forgets the parent's pool and makes its own.
std::atomic<ThreadPool*> current_pool{nullptr};

}  // namespace

// Lives on the stack of the thread that called for_each_block.
struct ThreadPool::Job {
    const std::function<void(std::size_t)>& body;
    const std::size_t blocks;
    std::atomic<std::size_t> next_block{0};
    std::size_t active_workers = 0;  // guarded by the pool's mutex

    void run() {
        const DefaultFloatEnvironment environment;
        for (std::size_t block; (block = next_block.fetch_add(1, std::memory_order_relaxed)) < blocks;)
            body(block);
    }
};

ThreadPool& ThreadPool::instance() {
    static const bool hooked = [] {
        pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
        std::atexit([] {
            if (ThreadPool* pool = current_pool.load()) pool->stop();
        });
        return true;
    }();
    static_cast<void>(hooked);
    ThreadPool* pool = current_pool.load();
    if (pool == nullptr) {
        auto* fresh = new ThreadPool;
        if (current_pool.compare_exchange_strong(pool, fresh)) return *fresh;
        delete fresh;  // another thread was first; this one has no workers yet
    }
    return *pool;
}

void ThreadPool::for_each_block(std::size_t blocks, unsigned threads,
                                const std::function<void(std::size_t)>& body) {
    Job job{body, blocks};
    const std::size_t helpers = blocks == 0 ? 0 : std::min<std::size_t>(threads, blocks) - 1;
    if (helpers == 0) {
        job.run();
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        start_workers(helpers);
        tickets_.insert(tickets_.end(), std::min(helpers, workers_.size()), &job);
    }
    work_ready_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    std::erase(tickets_, &job);  // workers that never came are not waited for
    job_done_.wait(lock, [&] { return job.active_workers == 0; });
}

void ThreadPool::start_workers(std::size_t count) {
    if (stopping_ || workers_.size() >= count) return;
    const AllSignalsBlocked blocked;
    workers_.reserve(count);
    try {
        while (workers_.size() < count) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
        // The system refuses more threads; the ones there are do all the blocks, with the same result.
    }
}

void ThreadPool::work() {
    pthread_setname_np(pthread_self(), "tierstream-cpu");
    // Threads that launch kernels and start transfers need little time, but at once: these here, which take all
    // that they get, stand back. On Linux a priority is a thread's own.
    setpriority(PRIO_PROCESS, 0, std::min(getpriority(PRIO_PROCESS, 0) + politeness, 19));
    std::unique_lock lock(mutex_);
    for (;;) {
        work_ready_.wait(lock, [&] { return stopping_ || !tickets_.empty(); });
        if (stopping_) return;
        Job& job = *tickets_.front();
        tickets_.pop_front();
        ++job.active_workers;
        lock.unlock();
        job.run();
        lock.lock();
        if (--job.active_workers == 0) job_done_.notify_all();
    }
}

void ThreadPool::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

}  // namespace tierstream
