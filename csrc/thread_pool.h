// A pool of worker threads that lives as long as the process and runs numbered blocks of work.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tierstream {

// Workers start when first wanted and stop at exit. Several threads may call at once; each also works on its
// own blocks, so a call finishes even if no worker is free or none could be started. After fork() the child
// has a fresh, empty pool.
class ThreadPool {
public:
    static ThreadPool& instance();

    // Calls body(block) once for each block in [0, blocks), on up to `threads` threads (>= 1), the calling
    // one among them; returns when all are done. Which thread runs which block is not fixed: a block's result
    // must not depend on it. Every body runs in the default floating-point environment (round to nearest,
    // subnormals kept), whatever the caller has set. body must not throw.
    void for_each_block(std::size_t blocks, unsigned threads, const std::function<void(std::size_t)>& body);

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

private:
    struct Job;

    ThreadPool() = default;
    void start_workers(std::size_t count);
    void work();
    void stop();

    std::mutex mutex_;
    std::condition_variable work_ready_;
    std::condition_variable job_done_;
    std::deque<Job*> tickets_;  // one entry for each worker that a job would like to have
    std::vector<std::thread> workers_;
    bool stopping_ = false;
};

}  // namespace tierstream
