// Executes CUDA kernels on the CPU, for tests: the kernel's own source, compiled by a C++ compiler.
//
// Every CUDA thread is a fiber. Several blocks are in flight at once, started in random order, and at every point where threads can meet (barriers, shuffles,
// votes, atomics, memory shared between blocks) a random fiber goes on. What this finds that a lucky run on a GPU may not:
//   - a barrier or vote that part of a block or warp does not reach, or reaches at another line;
//   - two threads that touch one cell of shared memory, one of them writing, with no barrier between them (whatever the order they happened to run in);
//     shared memory read before it is written;
//   - results that depend on the order in which blocks run, or on all of them running at once;
//   - data published to other blocks without a release: payload stores become visible late and in any order until then;
//   - waits that never end.
//   - in a cluster: shared memory of another block touched before that block is known to run, after it ended, or with no cluster barrier between.
// Build with address and undefined-behaviour sanitizers to find the rest. Not modelled: dynamic shared memory, warps larger or smaller than 32, partial
// masks, speed.
//
// A fault is printed and ends the process with status 3.
#pragma once

#include "cuda_emul_machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace emul {

// ------------------------------------------------------------------------------------------------------------- shared memory

struct Access {
  unsigned rank;
  int thread;
  uint64_t block_barriers, warp_barriers;
  size_t cluster_arrived, cluster_waited;

  static Access now() {
    const Fiber* f = machine.current;
    return {f->block->rank, f->thread, f->block_barriers, f->warp_barriers, f->cluster_arrived, f->cluster_waited};
  }

  bool same_thread(const Access& other) const { return rank == other.rank && thread == other.thread; }

  // `now`: an access of the thread that runs.
  bool before(const Access& now) const {
    const std::vector<bool>& releases = machine.current->block->cluster->releases;
    for (size_t phase = cluster_arrived; phase < now.cluster_waited; ++phase) {
      if (releases[phase]) return true;
    }
    if (rank != now.rank) return false;
    if (thread == now.thread || block_barriers < now.block_barriers) return true;
    return thread / 32 == now.thread / 32 && block_barriers == now.block_barriers && warp_barriers < now.warp_barriers;
  }
};

template <class T>
class Cell {
 public:
  operator T() const {
    const Access now = Access::now();
    if (!written_) fail("race: shared memory read before any thread wrote it");
    if (!writer_.before(now)) fail("race: shared memory read with no barrier after another thread's write");
    const auto mine = std::find_if(readers_.begin(), readers_.end(), [&](const Access& a) { return a.same_thread(now); });
    if (mine == readers_.end()) {
      readers_.push_back(now);
    } else {
      *mine = now;
    }
    return value_;
  }

  Cell& operator=(const T& value) {
    const Access now = Access::now();
    if (written_ && !writer_.before(now)) fail("race: shared memory written by two threads with no barrier between");
    for (const Access& reader : readers_) {
      if (!reader.before(now)) fail("race: shared memory written with no barrier after another thread's read");
    }
    readers_.clear();
    writer_ = now;
    written_ = true;
    value_ = value;
    return *this;
  }

 private:
  T value_{};
  bool written_ = false;
  Access writer_{};
  mutable std::vector<Access> readers_;
};

template <class T>
T& shared_variable(int line) {
  Variable& slot = machine.current->block->shared[line];
  if (!slot.data) slot = {std::make_shared<T>(), sizeof(T), [] { return std::shared_ptr<void>(std::make_shared<T>()); }};
  return *static_cast<T*>(slot.data.get());
}

// What lies in block `rank` of the cluster where `here` lies in this one.
template <class T>
T& remote(T& here, unsigned rank) {
  const Fiber* me = machine.current;
  if (rank != me->block->rank && me->cluster_waited == 0) fail("shared memory of another block touched before it is known to run");
  Block* target = rank < me->block->cluster->blocks.size() ? me->block->cluster->blocks[rank] : nullptr;
  if (!target) fail("shared memory of another block touched after it ended");
  for (const auto& [line, mine] : me->block->shared) {
    const auto offset = reinterpret_cast<uintptr_t>(&here) - reinterpret_cast<uintptr_t>(mine.data.get());
    if (offset >= mine.size) continue;
    Variable& slot = target->shared[line];
    if (!slot.data) slot = {mine.make(), mine.size, mine.make};
    return *reinterpret_cast<T*>(static_cast<char*>(slot.data.get()) + offset);
  }
  fail("no shared memory");
}

}  // namespace emul

#define threadIdx (dim3(static_cast<unsigned>(emul::machine.current->thread), 0, 0))
#define blockIdx (dim3(emul::machine.current->block->index, 0, 0))
#define blockDim (emul::machine.block_size)
#define gridDim (emul::machine.grid)

#define __syncthreads() emul::block_barrier(__LINE__)
#define __syncwarp() emul::warp_barrier(__LINE__)

// Lines are the callers': collectives at two places of the source never match.
template <class T>
T __shfl_sync(unsigned, T x, int from, int width = 32, int line = __builtin_LINE()) {
  return emul::exchange(x, emul::lane() / width * width + from % width, line);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by, int width = 32, int line = __builtin_LINE()) {
  return emul::exchange(x, emul::lane_in(width) >= by ? emul::lane() - by : emul::lane(), line);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by, int width = 32, int line = __builtin_LINE()) {
  return emul::exchange(x, emul::lane_in(width) + by < width ? emul::lane() + by : emul::lane(), line);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask, int width = 32, int line = __builtin_LINE()) {
  return emul::exchange(x, (emul::lane() ^ mask) / width == emul::lane() / width ? emul::lane() ^ mask : emul::lane(), line);
}
inline unsigned __ballot_sync(unsigned, bool vote, int line = __builtin_LINE()) { return emul::ballot(vote, line); }

inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
using std::max;
using std::min;
