// The machine: memory, streams, events, locked host memory; no torch in it.
//
// Device memory is a range of addresses that the host cannot touch: to read or write
// there ends the process. What is in it lies in a second mapping, which only jobs of
// streams use. Memory that is freed is overwritten, in the order of its stream.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace fake {

constexpr int kDevices = 2, kStreams = 8;
constexpr size_t kRange = size_t{8} << 30;  // addresses of one device
constexpr size_t kAlign = 512, kPage = 4096;
constexpr int kPoison = 0xDB;

inline std::atomic<int> delay_us{0};  // each job begins up to that late
inline std::atomic<bool> is_forked{false};

struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
  std::chrono::steady_clock::time_point at;

  void set() {
    std::lock_guard lock(mutex);
    is_set = true;
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return is_set; });
  }
  bool query() {
    std::lock_guard lock(mutex);
    return is_set;
  }
};
using SignalPtr = std::shared_ptr<Signal>;

// Jobs in order, in a thread that begins each of them late.
class Stream {
 public:
  std::atomic<bool> is_capturing{false};

  void push(std::function<void()> job) {
    if (is_forked) throw std::runtime_error("the fake device was used after a fork");
    std::lock_guard lock(mutex_);
    if (!has_thread_) std::thread([this] { run(); }).detach();
    has_thread_ = true;
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }
  SignalPtr mark() {
    auto signal = std::make_shared<Signal>();
    push([signal] { signal->set(); });
    return signal;
  }
  void synchronize() {
    if (!is_idle()) mark()->wait();
  }
  bool is_idle() {
    std::lock_guard lock(mutex_);
    return jobs_.empty();
  }

 private:
  void run() {
    uint64_t random = reinterpret_cast<uintptr_t>(this) | 1;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      auto job = jobs_.front();  // it stays there until it is done
      lock.unlock();
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      if (int most = delay_us)
        std::this_thread::sleep_for(std::chrono::microseconds(random % most));
      job();
      job = nullptr;
      lock.lock();
      jobs_.pop_front();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool has_thread_ = false;
};

struct Block {
  uintptr_t address;
  size_t size;
  Stream* stream;            // that it was allocated on
  std::set<Stream*> others;  // that use it, as record_stream tells
};

struct Figures {
  int64_t blocks, allocated, active, reserved, peak, ooms;
};

// Memory of one device, cached per stream as CUDA's: freed memory is given at once to
// the next allocation of that size on the same stream, and only record_stream delays it.
class Memory {
 public:
  explicit Memory() {
    auto map = [](int protection) {
      void* at = mmap(nullptr, kRange, protection,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) throw std::runtime_error("no room for the fake device");
      madvise(at, kRange, MADV_DONTFORK);
      return reinterpret_cast<uintptr_t>(at);
    };
    base_ = map(PROT_NONE), shadow_ = map(PROT_READ | PROT_WRITE);
    ranges_[base_] = kRange;
  }
  char* shadow(const void* address) const {
    auto at = reinterpret_cast<uintptr_t>(address) - base_;
    if (at >= kRange) throw std::runtime_error("not an address of this fake device");
    return reinterpret_cast<char*>(shadow_ + at);
  }
  bool has(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - base_ < kRange;
  }
  // Return a block; none if the device is full.
  Block* allocate(size_t nbytes, Stream* stream) {
    size_t size = (nbytes + kAlign - 1) / kAlign * kAlign;
    std::lock_guard lock(mutex_);
    reclaim();
    auto& cached = free_[{stream, size}];
    uintptr_t address = 0;
    if (!cached.empty()) {
      address = cached.back();
      cached.pop_back();
    } else if (!(address = reserve(size))) {
      release_cached();
      if (!(address = reserve(size))) return ++figures_.ooms, nullptr;
    }
    figures_.blocks += 1, figures_.allocated += size, figures_.active += size;
    figures_.peak = std::max(figures_.peak, figures_.active);
    auto block = new Block{address, size, stream, {}};
    poison(block);
    return block;
  }
  void release(Block* block) {
    if (is_forked) return;
    std::lock_guard lock(mutex_);
    figures_.blocks -= 1, figures_.allocated -= block->size;
    if (block->others.empty()) return recycle(block);
    std::vector<SignalPtr> ends;
    for (auto other : block->others) ends.push_back(other->mark());
    pending_.emplace_back(block, std::move(ends));
  }
  void use(Block* block, Stream* stream) {
    std::lock_guard lock(mutex_);
    if (stream != block->stream) block->others.insert(stream);
  }
  void set_capacity(size_t nbytes) {
    std::lock_guard lock(mutex_);
    capacity_ = nbytes;
  }
  void empty_cache() {
    std::lock_guard lock(mutex_);
    release_cached();
  }
  Figures figures(bool resets_peak) {
    std::lock_guard lock(mutex_);
    reclaim();
    auto found = figures_;
    if (resets_peak) figures_.peak = figures_.active;
    return found;
  }

 private:
  void poison(Block* block) {
    char* at = shadow(reinterpret_cast<void*>(block->address));
    block->stream->push([at, size = block->size] { memset(at, kPoison, size); });
  }
  void recycle(Block* block) {
    poison(block);
    figures_.active -= block->size;
    free_[{block->stream, block->size}].push_back(block->address);
    delete block;
  }
  void reclaim() {
    std::vector<std::pair<Block*, std::vector<SignalPtr>>> rest;
    for (auto& one : pending_) {
      bool is_over = true;
      for (auto& end : one.second) is_over = is_over && end->query();
      if (is_over) recycle(one.first);
      else rest.push_back(std::move(one));
    }
    pending_ = std::move(rest);
  }
  uintptr_t reserve(size_t size) {
    if (figures_.reserved + size > capacity_) return 0;
    for (auto [at, length] : ranges_) {
      if (length < size) continue;
      ranges_.erase(at);
      if (length > size) ranges_[at + size] = length - size;
      figures_.reserved += size;
      return at;
    }
    return 0;
  }
  void release_cached() {
    for (auto& one : pending_)
      for (auto& end : one.second) end->wait();
    reclaim();
    for (auto& [key, addresses] : free_) {
      key.first->synchronize();
      for (auto at : addresses) give_back(at, key.second);
    }
    free_.clear();
  }
  void give_back(uintptr_t at, size_t size) {
    figures_.reserved -= size;
    auto after = ranges_.lower_bound(at);
    if (after != ranges_.end() && after->first == at + size)
      size += after->second, after = ranges_.erase(after);
    if (after != ranges_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == at) {
        before->second += size;
        return;
      }
    }
    ranges_[at] = size;
  }
  std::mutex mutex_;
  uintptr_t base_, shadow_;
  size_t capacity_ = size_t{1} << 30;
  Figures figures_{};
  std::map<uintptr_t, size_t> ranges_;
  std::map<std::pair<Stream*, size_t>, std::vector<uintptr_t>> free_;
  std::vector<std::pair<Block*, std::vector<SignalPtr>>> pending_;
};

// Page-locked memory of the host: allocated here, or registered by its owner. What is
// allocated here is not used again before the copies that were begun from it ended.
class Host {
 public:
  void* allocate(size_t nbytes) {
    size_t size = std::max(kPage, (nbytes + kPage - 1) / kPage * kPage);
    std::lock_guard lock(mutex_);
    reclaim();
    auto& cached = free_[size];
    void* at = cached.empty() ? aligned_alloc(kPage, size) : cached.back();
    if (!cached.empty()) cached.pop_back();
    else bytes_ += size;
    memset(at, kPoison, size);
    blocks_[reinterpret_cast<uintptr_t>(at)] = {size, {}};
    return at;
  }
  void release(void* at) {
    if (is_forked) return;
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(reinterpret_cast<uintptr_t>(at));
    pending_.emplace_back(*found);
    blocks_.erase(found);
    reclaim();
  }
  enum Kind { kPageable, kAllocated, kRegistered };

  // Return what a range is in; have `end` delay its reuse, if it was allocated here.
  Kind kind_of(const void* from, size_t nbytes, const SignalPtr& end = nullptr) {
    std::lock_guard lock(mutex_);
    return find(reinterpret_cast<uintptr_t>(from), nbytes, end);
  }
  // Copy from registered memory; it is a violation if it is not so any more.
  void read(void* to, const void* from, size_t nbytes) {
    std::lock_guard lock(mutex_);
    if (find(reinterpret_cast<uintptr_t>(from), nbytes, nullptr) == kRegistered) {
      memcpy(to, from, nbytes);
    } else {
      ++violations;
      memset(to, kPoison, nbytes);
    }
  }
  // As cudaHostRegister: 0, or 1 (invalid), 712 (is registered).
  int lock(uintptr_t at, size_t size) {
    std::lock_guard lock(mutex_);
    unsigned char pages[1];
    bool is_mapped = size && !mincore(reinterpret_cast<void*>(at), kPage, pages);
    if (is_forked || !is_mapped || at % kPage || size % kPage) return 1;
    auto next = registered_.lower_bound(at);
    if (next != registered_.end() && next->first < at + size) return 712;
    if (next != registered_.begin()) {
      auto [start, length] = *std::prev(next);
      if (start + length > at) return 712;
    }
    locked_ += size;
    registered_[at] = size;
    return 0;
  }
  int unlock(uintptr_t at) {
    std::lock_guard lock(mutex_);
    auto found = registered_.find(at);
    if (is_forked || found == registered_.end()) return ++violations, 713;
    locked_ -= found->second;
    registered_.erase(found);
    return 0;
  }
  void figures(int64_t* out) {
    std::lock_guard lock(mutex_);
    reclaim();
    out[0] = registered_.size(), out[1] = locked_, out[2] = violations;
    out[3] = blocks_.size(), out[4] = bytes_;
  }
  std::atomic<int> violations{0};

 private:
  Kind find(uintptr_t at, size_t nbytes, const SignalPtr& end) {
    auto found = blocks_.upper_bound(at);
    if (found != blocks_.begin()) {
      auto& [start, block] = *std::prev(found);
      if (at + nbytes <= start + block.first) {
        if (end) block.second.push_back(end);
        return kAllocated;
      }
    }
    auto other = registered_.upper_bound(at);
    if (other == registered_.begin()) return kPageable;
    auto [start, size] = *std::prev(other);
    if (at < start + size && at + nbytes > start + size)
      throw std::runtime_error("a copy from memory that is registered in part");
    return at + nbytes <= start + size ? kRegistered : kPageable;
  }
  using Allocated = std::pair<size_t, std::vector<SignalPtr>>;
  void reclaim() {
    std::vector<std::pair<uintptr_t, Allocated>> rest;
    for (auto& one : pending_) {
      auto& [size, ends] = one.second;
      bool is_over = true;
      for (auto& end : ends) is_over = is_over && end->query();
      if (!is_over) {
        rest.push_back(one);
        continue;
      }
      memset(reinterpret_cast<void*>(one.first), kPoison, size);
      free_[size].push_back(reinterpret_cast<void*>(one.first));
    }
    pending_ = std::move(rest);
  }
  std::mutex mutex_;
  std::map<uintptr_t, Allocated> blocks_;
  std::map<uintptr_t, size_t> registered_;
  std::map<size_t, std::vector<void*>> free_;
  std::vector<std::pair<uintptr_t, Allocated>> pending_;
  size_t locked_ = 0, bytes_ = 0;
};

struct Machine {
  Stream streams[kDevices][kStreams];
  Memory memory[kDevices];
  Host host;
  std::atomic<int> next_stream{0};

  Machine() {
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
  }
  static Machine& get() {
    static auto* machine = new Machine;  // threads use it to the very end
    return *machine;
  }
};

}  // namespace fake
