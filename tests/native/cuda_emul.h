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
// Build with address and undefined-behaviour sanitizers to find the rest. Not modelled: dynamic shared memory, warps larger or smaller than 32, partial
// masks, speed.
//
// A fault is printed and ends the process with status 3.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emul {

[[noreturn]] inline void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "cuda_emul: %s%s\n", what, detail);
  std::fflush(nullptr);
  std::_Exit(3);
}

// ------------------------------------------------------------------------------------------------------------------ fibers

#if defined(__x86_64__)
// Swaps stacks; the callee-saved registers lie on them. (swapcontext does the same and two system calls.)
extern "C" void emul_switch(void** save, void* load);
asm(R"(
.weak emul_switch
.type emul_switch, @function
emul_switch:
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
.size emul_switch, .-emul_switch
)");

struct Context {
  void* stack_pointer = nullptr;

  void prepare(char* stack, size_t size, void (*entry)()) {
    auto top = reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t{15};
    auto* slot = reinterpret_cast<void**>(top);
    *--slot = nullptr;                           // alignment, and where a return from `entry` would go
    *--slot = reinterpret_cast<void*>(entry);    // what the first switch returns to
    for (int i = 0; i < 6; ++i) *--slot = nullptr;
    stack_pointer = slot;
  }
  void switch_to(Context& other) { emul_switch(&stack_pointer, other.stack_pointer); }
};
#else
struct Context {
  ucontext_t context;

  void prepare(char* stack, size_t size, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&context, &other.context); }
};
#endif

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Block;

struct Fiber {
  static constexpr size_t kStack = 64 * 1024;
  Context context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Block* block;
  int thread;
  State state;
  int line;                 // of the barrier it waits at
  uint64_t block_barriers;  // passed so far
  uint64_t warp_barriers;   // __syncwarp only: shuffles and votes do not order memory
  unsigned collectives;     // shuffles and votes
  uint64_t slots[2];        // what it offers to the others in a collective; two, so that one rendezvous a collective is enough
  std::vector<std::pair<double*, double>> pending;  // payload stores other blocks cannot see yet
};

struct Block {
  unsigned index;
  std::vector<Fiber*> fibers;
  std::map<int, std::shared_ptr<void>> shared;  // by line of the declaration
};

struct Machine {
  Context scheduler;
  std::mt19937 random{1};
  Fiber* current = nullptr;
  dim3 grid, block_size;
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Fiber>> idle;
};

inline Machine machine;

#if defined(__SANITIZE_ADDRESS__)
struct SchedulerStack {
  void* fake = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
};
inline SchedulerStack scheduler_stack;
#endif

inline void flush(Fiber& f, bool all) {
  while (!f.pending.empty()) {
    const size_t i = all ? 0 : machine.random() % f.pending.size();
    *f.pending[i].first = f.pending[i].second;
    f.pending.erase(f.pending.begin() + static_cast<std::ptrdiff_t>(i));
    if (!all) return;
  }
}

// Back to the scheduler. `last`: the fiber will not run again.
inline void leave(bool last = false) {
  Fiber* me = machine.current;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake, scheduler_stack.bottom, scheduler_stack.size);
#else
  (void)last;
#endif
  me->context.switch_to(machine.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void enter(Fiber& f) {
  machine.current = &f;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_stack.fake, f.stack.get(), Fiber::kStack);
#endif
  machine.scheduler.switch_to(f.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_stack.fake, nullptr, nullptr);
#endif
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack.bottom, &scheduler_stack.size);
#endif
  machine.kernel();
  leave();  // others may run before this thread's last stores arrive
  flush(*machine.current, true);
  machine.current->state = State::done;
  leave(true);
}

inline void give_way() { leave(); }

inline void wait(State state, int line) {
  machine.current->state = state;
  machine.current->line = line;
  leave();
}

inline std::unique_ptr<Block> start_block(unsigned index, std::vector<Fiber*>& ready) {
  auto block = std::make_unique<Block>();
  block->index = index;
  const int threads = static_cast<int>(machine.block_size.x);
  for (int t = 0; t < threads; ++t) {
    if (machine.idle.empty()) machine.idle.push_back(std::make_unique<Fiber>());
    Fiber* f = machine.idle.back().release();
    machine.idle.pop_back();
    f->context.prepare(f->stack.get(), Fiber::kStack, fiber_main);
    f->block = block.get();
    f->thread = t;
    f->state = State::ready;
    f->line = 0;
    f->block_barriers = f->warp_barriers = 0;
    f->collectives = 0;
    block->fibers.push_back(f);
    ready.push_back(f);
  }
  return block;
}

// Fibers [first, last) of a block: if all that still run wait for `state`, at one line, let them go.
inline void release_if_complete(Block& block, size_t first, size_t last, State state, std::vector<Fiber*>& ready) {
  int line = 0;
  for (size_t i = first; i < last; ++i) {
    const Fiber& f = *block.fibers[i];
    if (f.state == State::done) continue;
    if (f.state != state) return;
    if (line != 0 && f.line != line) fail("threads meet at different barriers or collectives");
    line = f.line;
  }
  if (line == 0) return;
  for (size_t i = first; i < last; ++i) {
    Fiber& f = *block.fibers[i];
    if (f.state == State::done) continue;
    f.state = State::ready;
    if (state == State::at_block_barrier) ++f.block_barriers;
    ready.push_back(&f);
  }
}

struct Options {
  unsigned seed = 1;
  unsigned in_flight = 3;  // blocks at once
  uint64_t most_steps = 200'000'000;
};

template <class Kernel>
void launch(unsigned blocks, unsigned threads, Options options, Kernel kernel) {
  if (threads % 32 != 0) fail("whole warps only");
  machine.random.seed(options.seed);
  machine.grid = dim3(blocks);
  machine.block_size = dim3(threads);
  machine.kernel = kernel;
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), machine.random);
  std::vector<std::unique_ptr<Block>> running;
  std::vector<Fiber*> ready;
  size_t next = 0;
  for (uint64_t step = 0;; ++step) {
    while (running.size() < options.in_flight && next < order.size()) running.push_back(start_block(order[next++], ready));
    if (ready.empty()) {
      if (running.empty()) return;
      fail("deadlock: no thread can go on (a barrier that not all of them reach)");
    }
    if (step > options.most_steps) fail("a wait that never ends");
    const size_t pick = machine.random() % ready.size();
    Fiber* f = ready[pick];
    ready[pick] = ready.back();
    ready.pop_back();
    enter(*f);
    if (machine.random() % 8 == 0) flush(*f, false);
    Block& block = *f->block;
    const size_t warp = static_cast<size_t>(f->thread) / 32 * 32;
    switch (f->state) {
      case State::ready:
        ready.push_back(f);
        break;
      case State::at_warp_barrier:
        release_if_complete(block, warp, warp + 32, State::at_warp_barrier, ready);
        break;
      case State::at_block_barrier:
        release_if_complete(block, 0, block.fibers.size(), State::at_block_barrier, ready);
        break;
      case State::done:
        release_if_complete(block, warp, warp + 32, State::at_warp_barrier, ready);
        release_if_complete(block, 0, block.fibers.size(), State::at_block_barrier, ready);
        if (std::all_of(block.fibers.begin(), block.fibers.end(), [](Fiber* x) { return x->state == State::done; })) {
          for (Fiber* x : block.fibers) machine.idle.emplace_back(x);
          running.erase(std::find_if(running.begin(), running.end(), [&](const auto& b) { return b.get() == &block; }));
        }
        break;
    }
  }
}

inline int thread_index() { return machine.current->thread; }

inline void block_barrier(int line) { wait(State::at_block_barrier, line); }

inline void warp_barrier(int line) {
  wait(State::at_warp_barrier, line);
  ++machine.current->warp_barriers;
}

// Every lane offers a value; `from` gives the lane whose value this one takes.
template <class T>
T exchange(T value, int from, int line) {
  static_assert(sizeof(T) <= 8);
  Fiber* me = machine.current;
  const unsigned slot = me->collectives++ % 2;
  std::memcpy(&me->slots[slot], &value, sizeof value);
  Block* block = me->block;
  const int warp = me->thread / 32 * 32;
  wait(State::at_warp_barrier, line);
  T taken;
  std::memcpy(&taken, &block->fibers[static_cast<size_t>(warp + from)]->slots[slot], sizeof taken);
  return taken;
}

inline unsigned ballot(bool vote, int line) {
  Fiber* me = machine.current;
  const unsigned slot = me->collectives++ % 2;
  me->slots[slot] = vote;
  Block* block = me->block;
  const int warp = me->thread / 32 * 32;
  wait(State::at_warp_barrier, line);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(block->fibers[static_cast<size_t>(warp + lane)]->slots[slot]) << lane;
  return votes;
}

inline int lane_in(int width) { return machine.current->thread % width; }
inline int lane() { return machine.current->thread % 32; }

// ------------------------------------------------------------------------------------------------------------- shared memory

struct Access {
  int thread;
  uint64_t block_barriers, warp_barriers;

  static Access now() {
    const Fiber* f = machine.current;
    return {f->thread, f->block_barriers, f->warp_barriers};
  }

  bool before(const Access& other) const {
    if (thread == other.thread || block_barriers < other.block_barriers) return true;
    return thread / 32 == other.thread / 32 && block_barriers == other.block_barriers && warp_barriers < other.warp_barriers;
  }
};

template <class T>
class Cell {
 public:
  operator T() const {
    const Access now = Access::now();
    if (!written_) fail("race: shared memory read before any thread wrote it");
    if (!writer_.before(now)) fail("race: shared memory read with no barrier after another thread's write");
    const auto mine = std::find_if(readers_.begin(), readers_.end(), [&](const Access& a) { return a.thread == now.thread; });
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
  auto& slot = machine.current->block->shared[line];
  if (!slot) slot = std::make_shared<T>();
  return *static_cast<T*>(slot.get());
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

// --------------------------------------------------------------------------------------------- the names of csrc/cuda/device.h

namespace sapo::cuda {

template <class T>
using Shared = emul::Cell<T>;

#define SAPO_SHARED(Type, name) Type& name = emul::shared_variable<Type>(__LINE__)

inline void store_release(unsigned* to, unsigned x) {
  emul::give_way();
  emul::flush(*emul::machine.current, true);
  *to = x;
}

inline unsigned load_acquire(const unsigned* from) {
  emul::give_way();
  return *from;
}

inline unsigned add_acquire_release(unsigned* to, unsigned x) {
  emul::give_way();
  emul::flush(*emul::machine.current, true);
  const unsigned old = *to;
  *to += x;
  return old;
}

inline void store_payload(double* to, double x) { emul::machine.current->pending.emplace_back(to, x); }

inline double load_payload(const double* from) {
  emul::give_way();
  const auto& pending = emul::machine.current->pending;
  for (auto i = pending.rbegin(); i != pending.rend(); ++i) {
    if (i->first == from) return i->second;
  }
  return *from;
}

inline void spin_pause() { emul::give_way(); }

}  // namespace sapo::cuda
