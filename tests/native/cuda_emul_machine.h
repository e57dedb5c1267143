// The emulator's machine: a fiber per CUDA thread, the scheduler, barriers and exchanges between lanes. See cuda_emul.h.
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

enum class State { ready, at_block_barrier, at_warp_barrier, at_cluster_barrier, done };

struct Block;

// Blocks that run together and see each other's shared memory.
struct Cluster {
  std::vector<Block*> blocks;    // null: ended
  std::vector<bool> releases;    // of each phase of its barrier: did every thread arrive with a release?
};

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
  size_t cluster_arrived, cluster_waited;  // phases of the cluster's barrier
  unsigned collectives;     // shuffles and votes
  uint64_t slots[2];        // what it offers to the others in a collective; two, so that one rendezvous a collective is enough
  std::vector<std::pair<double*, double>> pending;  // payload stores other blocks cannot see yet
};

struct Variable {
  std::shared_ptr<void> data;
  size_t size;
  std::shared_ptr<void> (*make)();
};

struct Block {
  unsigned index;
  unsigned rank;  // in its cluster
  std::shared_ptr<Cluster> cluster;
  std::vector<Fiber*> fibers;
  std::map<int, Variable> shared;  // by line of the declaration
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

inline std::unique_ptr<Block> start_block(unsigned index, std::shared_ptr<Cluster> cluster, std::vector<Fiber*>& ready) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->rank = static_cast<unsigned>(cluster->blocks.size());
  cluster->blocks.push_back(block.get());
  block->cluster = std::move(cluster);
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
    f->cluster_arrived = f->cluster_waited = 0;
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

// Lets go who waits for the cluster's barrier, once all that still run have arrived.
inline void release_cluster_if_complete(Cluster& cluster, std::vector<Fiber*>& ready) {
  const auto each = [&](auto visit) {
    for (Block* block : cluster.blocks) {
      if (!block) continue;
      for (Fiber* f : block->fibers) {
        if (f->state != State::done) visit(*f);
      }
    }
  };
  size_t arrived = SIZE_MAX;
  each([&](const Fiber& f) { arrived = std::min(arrived, f.cluster_arrived); });
  each([&](Fiber& f) {
    if (f.state != State::at_cluster_barrier || f.cluster_waited >= arrived) return;
    f.state = State::ready;
    ++f.cluster_waited;
    ready.push_back(&f);
  });
}

struct Options {
  unsigned seed = 1;
  unsigned in_flight = 3;  // blocks at once
  uint64_t most_steps = 200'000'000;
  unsigned cluster = 1;  // blocks of a cluster
};

template <class Kernel>
void launch(unsigned blocks, unsigned threads, Options options, Kernel kernel) {
  if (threads % 32 != 0) fail("whole warps only");
  if (blocks % options.cluster != 0) fail("whole clusters only");
  machine.random.seed(options.seed);
  machine.grid = dim3(blocks);
  machine.block_size = dim3(threads);
  machine.kernel = kernel;
  std::vector<unsigned> order(blocks / options.cluster);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), machine.random);
  std::vector<std::unique_ptr<Block>> running;
  std::vector<Fiber*> ready;
  size_t next = 0;
  for (uint64_t step = 0;; ++step) {
    while (running.size() < options.in_flight && next < order.size()) {
      const auto cluster = std::make_shared<Cluster>();
      for (unsigned i = 0; i < options.cluster; ++i) running.push_back(start_block(order[next] * options.cluster + i, cluster, ready));
      ++next;
    }
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
      case State::at_cluster_barrier:
        release_cluster_if_complete(*block.cluster, ready);
        break;
      case State::done:
        release_if_complete(block, warp, warp + 32, State::at_warp_barrier, ready);
        release_if_complete(block, 0, block.fibers.size(), State::at_block_barrier, ready);
        if (std::all_of(block.fibers.begin(), block.fibers.end(), [](Fiber* x) { return x->state == State::done; })) {
          block.cluster->blocks[block.rank] = nullptr;
          release_cluster_if_complete(*block.cluster, ready);
          for (Fiber* x : block.fibers) machine.idle.emplace_back(x);
          running.erase(std::find_if(running.begin(), running.end(), [&](const auto& b) { return b.get() == &block; }));
        }
        break;
    }
  }
}

// The two halves of a cluster's barrier. A wait follows every arrival.
inline void cluster_arrive(bool release) {
  Fiber* f = machine.current;
  if (f->cluster_arrived != f->cluster_waited) fail("a thread arrives twice at the cluster's barrier");
  std::vector<bool>& releases = f->block->cluster->releases;
  if (releases.size() <= f->cluster_arrived) releases.resize(f->cluster_arrived + 1, true);
  releases[f->cluster_arrived] = releases[f->cluster_arrived] && release;
  if (release) flush(*f, true);
  ++f->cluster_arrived;
  give_way();
}

inline void cluster_wait(int line) {
  if (machine.current->cluster_arrived == machine.current->cluster_waited) fail("a wait at the cluster's barrier without an arrival");
  wait(State::at_cluster_barrier, line);
}

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

}  // namespace emul
