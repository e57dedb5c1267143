// Turn-level and token-level GAE on the GPU: one launch, one read and one write of every array, no host in between.
//
// Two regimes share the launch, because only the device knows the lengths.
//   short  (up to one tile): a group of lanes walks one trajectory from its end in windows, a shuffle scan a window; one carry between windows.
//   long   the turns are cut into tiles of equal size, a block a tile, from the right. A tile's stretch of a trajectory is an affine map of the future
//          at its right edge (core/gae.h). Every tile publishes its map as soon as it has it, waiting for nobody, then composes those to its right up to
//          the end of the trajectory: first those of its own group of tiles, then whole groups, whose maps their leftmost tiles publish, then the
//          tiles of the last group. Which maps are composed, and in which order, depends on positions alone, never on timing: results are
//          the same to the last bit in every run. (A look-back that takes whatever prefix happens to be there, as in usual single-pass scans, is not.)
// Tiles take numbers from a counter, so a tile only waits for blocks that already run.
//
// A trajectory's numbers never enter another's arithmetic, so a NaN stays where it is. Offsets that break the rules give wrong numbers, but
// neither an access out of bounds nor an endless wait.
#pragma once

#include "core/problem.h"
#include "device.h"

namespace sapo::cuda {

// Maps of a stretch for the two lambdas (the second only where they differ).
template <bool kTwo>
struct Maps {
  Affine of[kTwo ? 2 : 1];
};

// Sizes of the long regime. The tests run small ones, to meet many tiles and groups with few turns.
template <int kWarpsOf, int kWindowsOf, int kGroupOf>
struct Sizes {
  static constexpr int kWarps = kWarpsOf;             // a block
  static constexpr int kThreads = 32 * kWarps;        //
  static constexpr int kWindows = kWindowsOf;         // windows of 32 turns, a warp
  static constexpr int kSpan = 32 * kWindows;         // turns of a warp
  static constexpr int kTile = kSpan * kWarps;        // turns of a block; longer trajectories are long
  static constexpr int kGroup = kGroupOf;             // tiles that publish one map together
  static_assert(kGroup <= 32, "a warp composes the tiles of a group at once");
};

// Device memory of one launch. What lies before `maps` must be zero.
struct Workspace {
  unsigned* ticket;       // 1: next tile
  unsigned* finished;     // 1: blocks done
  unsigned* tile_ready;   // a tile
  unsigned* group_ready;  // a group
  double* tile_maps;      // 4 a tile
  double* group_maps;     // 4 a group
  double* parts;          // 4 a block: moments
  int64_t tiles, groups, short_blocks;

  SAPO_HD int64_t blocks() const { return tiles + short_blocks; }
};

// How a launch is laid out: host arithmetic, shared with the tests.
template <class S>
struct Plan {
  static constexpr int64_t kMostShortBlocks = 2048;

  int64_t tiles, groups, short_blocks;

  Plan(int64_t total, int64_t trajectories, int width) {
    tiles = total > S::kTile ? (total + S::kTile - 1) / S::kTile : 0;  // else no trajectory can be long
    groups = (tiles + S::kGroup - 1) / S::kGroup;
    const int64_t a_block = S::kThreads / width;
    short_blocks = (trajectories + a_block - 1) / a_block;
    short_blocks = short_blocks < 1 ? 1 : short_blocks > kMostShortBlocks ? kMostShortBlocks : short_blocks;
  }

  int64_t zeroed_bytes() const { return ((2 + tiles + groups) * 4 + 7) / 8 * 8; }
  int64_t bytes() const { return zeroed_bytes() + 32 * (tiles + groups + tiles + short_blocks); }

  Workspace carve(void* memory) const {
    auto* counters = static_cast<unsigned*>(memory);
    auto* doubles = reinterpret_cast<double*>(static_cast<char*>(memory) + zeroed_bytes());
    return {counters,         counters + 1,          counters + 2, counters + 2 + tiles, doubles, doubles + 4 * tiles, doubles + 4 * (tiles + groups),
            tiles,            groups,                short_blocks};
  }
};

__device__ __forceinline__ Affine shuffle_up(Affine x, int by, int width = 32) {
  return {__shfl_up_sync(kAll, x.a, by, width), __shfl_up_sync(kAll, x.b, by, width)};
}
__device__ __forceinline__ Affine shuffle_down(Affine x, int by) { return {__shfl_down_sync(kAll, x.a, by), __shfl_down_sync(kAll, x.b, by)}; }
__device__ __forceinline__ Affine shuffle(Affine x, int lane) { return {__shfl_sync(kAll, x.a, lane), __shfl_sync(kAll, x.b, lane)}; }
__device__ __forceinline__ Moments shuffle_down(Moments x, int by) {
  return {__shfl_down_sync(kAll, x.count, by), __shfl_down_sync(kAll, x.mean, by), __shfl_down_sync(kAll, x.m2, by), __shfl_down_sync(kAll, x.size, by)};
}

// Composition of the maps of lanes 0 .. this one, lane 0 the latest, in groups of `kWidth` lanes.
template <int kWidth = 32>
__device__ __forceinline__ Affine scan(Affine x, int lane) {
#pragma unroll
  for (int by = 1; by < kWidth; by *= 2) {
    const Affine later = shuffle_up(x, by, kWidth);
    if (lane >= by) x = compose(x, later);
  }
  return x;
}

// One turn or token in a register, and what becomes of it once the future after it is known.
template <bool kTokens>
struct Element {
  float reward = 0.0f, value = 0.0f;
  bool here = false, action = false;

  __device__ __forceinline__ static Element load(const Problem& p, int64_t t, bool here) {
    Element e;
    e.here = here;
    if (!here) return e;
    e.reward = p.rewards[t];
    e.action = !kTokens || p.actions[t];
    if (e.action) e.value = p.values[t];  // what another token holds may be anything
    return e;
  }

  // No element is the identity.
  __device__ __forceinline__ Affine map(Decay decay) const {
    if (!here) return {1.0, 0.0};
    return token_map(!kTokens || action, reward, value, decay);
  }

  __device__ __forceinline__ void write(const Problem& p, int64_t t, int64_t end, float q_after_end, double policy_future, double value_future,
                                        Sums& sums) const {
    if (!here) return;
    const double r = reward, v = value;
    const float advantage = action ? static_cast<float>(lambda_return(r, policy_future) - v) : 0.0f;
    p.advantages[t] = advantage;
    p.v_targets[t] = action ? static_cast<float>(lambda_return(r, value_future)) : 0.0f;
    if constexpr (kTokens) {
      if (action && p.moments) sums.add(advantage);
    } else {
      if (p.q_values) {
        const double q_next = t + 1 < end ? p.q_values[t + 1] : q_after_end;
        p.q_targets[t] = static_cast<float>(sarsa_target(r, q_next, p.gamma));
      }
      if (p.moments && (!p.valid || p.valid[t])) sums.add(p.invalid && p.invalid[t] ? advantage - p.invalid_penalty : static_cast<double>(advantage));
    }
  }
};

struct Range {
  int64_t begin, end;
};

__device__ __forceinline__ Range trajectory_range(const Problem& p, int64_t b) {
  const int64_t begin = p.offsets[b], end = p.offsets[b + 1];
  const bool sound = 0 <= begin && begin <= end && end <= p.total;
  return {sound ? begin : 0, sound ? end : 0};
}

// ------------------------------------------------------------------------------------------------------------------ short

// x^n for n < 32.
__device__ __forceinline__ double power(double x, int n) {
  double y = 1.0;
#pragma unroll
  for (int bit = 0; bit < 5; ++bit) {
    if (n >> bit & 1) y *= x;
    x *= x;
  }
  return y;
}

// The future after each lane of a window of `kWidth` lanes, lane 0 the latest, and the future before the window.
// `inside`: after each lane, without what is carried in, weighted `weight`.
template <bool kTokens, int kWidth>
struct Window {
  double inside, weight, whole_inside, whole_weight;

  // `power_here` is carried^lane: turns all weigh the same, and lanes without one are the last of the window.
  __device__ __forceinline__ Window(const Element<kTokens>& e, Decay decay, double power_here, int lane) {
    if constexpr (kTokens) {
      const Affine x = scan<kWidth>(e.map(decay), lane);
      const Affine before = shuffle_up(x, 1, kWidth);
      inside = lane == 0 ? 0.0 : before.b;
      weight = lane == 0 ? 1.0 : before.a;
      whole_inside = __shfl_sync(kAll, x.b, kWidth - 1, kWidth);
      whole_weight = __shfl_sync(kAll, x.a, kWidth - 1, kWidth);
    } else {
      double x = e.map(decay).b;
      double step = decay.carried;
#pragma unroll
      for (int by = 1; by < kWidth; by *= 2) {
        const double later = __shfl_up_sync(kAll, x, by, kWidth);
        if (lane >= by) x = apply({step, x}, later);
        step *= step;
      }
      const double before = __shfl_up_sync(kAll, x, 1, kWidth);
      inside = lane == 0 ? 0.0 : before;
      weight = power_here;
      whole_inside = __shfl_sync(kAll, x, kWidth - 1, kWidth);
      whole_weight = step;
    }
  }

  __device__ __forceinline__ double after(double carried_in) const { return apply({weight, inside}, carried_in); }
  __device__ __forceinline__ double before_all(double carried_in) const { return apply({whole_weight, whole_inside}, carried_in); }
};

template <class S, bool kTokens, bool kTwo, int kWidth>
__device__ __forceinline__ void short_trajectories(const Problem& p, const Workspace& w, int64_t block, Sums& sums) {
  constexpr int kGroups = S::kThreads / kWidth;  // trajectories a block walks at once
  const int lane = threadIdx.x % kWidth;
  const double policy_power = power(p.policy.carried, lane), value_power = kTwo ? power(p.value.carried, lane) : 0.0;
  const int64_t rounds = (p.trajectories + kGroups * w.short_blocks - 1) / (kGroups * w.short_blocks);
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t b = (round * w.short_blocks + block) * kGroups + threadIdx.x / kWidth;
    Range range{0, 0};
    if (b < p.trajectories) range = trajectory_range(p, b);
    int length = range.end - range.begin > S::kTile ? 0 : static_cast<int>(range.end - range.begin);
    int longest = length;  // of the groups of this warp, which shuffle together
#pragma unroll
    for (int by = 16; by >= kWidth; by /= 2) longest = max(longest, __shfl_xor_sync(kAll, longest, by));
    if (longest == 0) continue;
    const float bootstrap = length > 0 && p.bootstrap ? p.bootstrap[b] : 0.0f;
    double policy_future = p.gamma * bootstrap, value_future = policy_future;
    for (int done = 0; done < longest; done += kWidth) {
      const int64_t t = range.end - 1 - done - lane;
      const auto e = Element<kTokens>::load(p, t, done + lane < length);
      const Window<kTokens, kWidth> policy(e, p.policy, policy_power, lane);
      const double after = policy.after(policy_future);
      policy_future = policy.before_all(policy_future);
      if constexpr (kTwo) {
        const Window<kTokens, kWidth> value(e, p.value, value_power, lane);
        e.write(p, t, range.end, bootstrap, after, value.after(value_future), sums);
        value_future = value.before_all(value_future);
      } else {
        e.write(p, t, range.end, bootstrap, after, after, sums);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------- long

// The trajectory that holds turn `t`: the last that begins at or before it. All lanes of the warp look, 32 places at a time.
__device__ __forceinline__ int64_t trajectory_of(const Problem& p, int64_t t, int lane) {
  int64_t low = 0, high = p.trajectories;  // in [low, high)
  while (high - low > 1) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t at = low + lane * step;
    const unsigned at_or_before = __ballot_sync(kAll, at < high && p.offsets[at] <= t);
    const int64_t last = at_or_before ? 31 - __clz(static_cast<int>(at_or_before)) : 0;
    low += last * step;
    high = high < low + step ? high : low + step;
  }
  return low;
}

template <bool kTwo>
__device__ __forceinline__ void publish(double* maps, unsigned* ready, int64_t i, const Maps<kTwo>& m) {
#pragma unroll
  for (int k = 0; k < (kTwo ? 2 : 1); ++k) {
    store_payload(maps + 4 * i + 2 * k, m.of[k].a);
    store_payload(maps + 4 * i + 2 * k + 1, m.of[k].b);
  }
  store_release(ready + i, 1u);
}

// Composition of maps [first, last], at most 32, known to every lane. Waits until they are there.
template <bool kTwo>
__device__ __forceinline__ Maps<kTwo> collect(const double* maps, const unsigned* ready, int64_t first, int64_t last, int lane) {
  Maps<kTwo> m;
#pragma unroll
  for (int k = 0; k < (kTwo ? 2 : 1); ++k) m.of[k] = {1.0, 0.0};
  if (first + lane <= last) {
    while (load_acquire(ready + first + lane) == 0u) spin_pause();
#pragma unroll
    for (int k = 0; k < (kTwo ? 2 : 1); ++k) {
      const double* at = maps + 4 * (first + lane) + 2 * k;
      m.of[k] = {load_payload(at), load_payload(at + 1)};
    }
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < (kTwo ? 2 : 1); ++k) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const Affine later = shuffle_down(m.of[k], by);
      if (lane + by < 32) m.of[k] = compose(m.of[k], later);
    }
    m.of[k] = shuffle(m.of[k], 0);
  }
  return m;
}

template <class S, bool kTwo>
struct LongShared {
  Shared<unsigned> ticket;
  Shared<Affine> warp_maps[S::kWarps][2];
  Shared<double> futures[2];  // at the right edge of the tile's stretch
};

// What of trajectory [range.begin, range.end) lies in tile `tile`, all warps together.
template <class S, bool kTokens, bool kTwo>
__device__ __forceinline__ void stretch(const Problem& p, const Workspace& w, LongShared<S, kTwo>& shared, int64_t tile, Range range, int64_t b, Sums& sums) {
  constexpr int kMaps = kTwo ? 2 : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t low = tile * S::kTile, high = low + S::kTile;
  const int64_t from = range.begin > low ? range.begin : low, to = range.end < high ? range.end : high;
  const Decay decays[2] = {p.policy, p.value};

  // Each warp: the maps of its windows, from the right, and of its whole span.
  const int64_t right = low + (warp + 1) * S::kSpan - 1 - lane;
  Element<kTokens> elements[S::kWindows];
  Affine scans[S::kWindows];  // of the first map; those of the second are made again when needed: registers are dearer than shuffles
#pragma unroll
  for (int i = 0; i < S::kWindows; ++i) {
    const int64_t t = right - 32 * i;
    elements[i] = Element<kTokens>::load(p, t, from <= t && t < to);
  }
  Affine span[kMaps];
#pragma unroll
  for (int k = 0; k < kMaps; ++k) {
    span[k] = {1.0, 0.0};
#pragma unroll
    for (int i = 0; i < S::kWindows; ++i) {
      const Affine x = scan(elements[i].map(decays[k]), lane);
      if (k == 0) scans[i] = x;
      span[k] = compose(shuffle(x, 31), span[k]);
    }
    if (lane == 0) shared.warp_maps[warp][k] = span[k];
  }
  __syncthreads();

  // The first warp: publish the tile's map, then find the future at its right edge.
  const float bootstrap = p.bootstrap ? p.bootstrap[b] : 0.0f;
  if (warp == 0) {
    Maps<kTwo> own;
#pragma unroll
    for (int k = 0; k < kMaps; ++k) {
      own.of[k] = {1.0, 0.0};
      for (int i = S::kWarps - 1; i >= 0; --i) own.of[k] = compose(shared.warp_maps[i][k], own.of[k]);
    }
    const bool goes_on_left = range.begin < low;
    if (goes_on_left && lane == 0) publish<kTwo>(w.tile_maps, w.tile_ready, tile, own);

    double future[kMaps];
#pragma unroll
    for (int k = 0; k < kMaps; ++k) future[k] = p.gamma * bootstrap;
    const auto through = [&](const Maps<kTwo>& m) {
#pragma unroll
      for (int k = 0; k < kMaps; ++k) future[k] = apply(m.of[k], future[k]);
    };
    const int64_t last = (range.end - 1) / S::kTile;  // tile of the trajectory's end
    if (tile < last) {
      const int64_t group = tile / S::kGroup, last_group = last / S::kGroup;
      const int64_t group_end = (group + 1) * S::kGroup - 1 < last ? (group + 1) * S::kGroup - 1 : last;
      const Maps<kTwo> rest = collect<kTwo>(w.tile_maps, w.tile_ready, tile + 1, group_end, lane);
      if (group < last_group) {
        if (tile == group * S::kGroup && goes_on_left && lane == 0) {
          Maps<kTwo> all;
#pragma unroll
          for (int k = 0; k < kMaps; ++k) all.of[k] = compose(own.of[k], rest.of[k]);
          publish<kTwo>(w.group_maps, w.group_ready, group, all);
        }
        __syncwarp();
        through(collect<kTwo>(w.tile_maps, w.tile_ready, last_group * S::kGroup, last, lane));
        for (int64_t g = last_group - 1; g > group; g -= 32) {
          const int64_t first = g - 31 > group ? g - 31 : group + 1;
          through(collect<kTwo>(w.group_maps, w.group_ready, first, g, lane));
        }
      }
      through(rest);
    }
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < kMaps; ++k) shared.futures[k] = future[k];
    }
  }
  __syncthreads();

  // Every warp: the future at the right edge of its span, then its windows.
  double future[2];
#pragma unroll
  for (int k = 0; k < kMaps; ++k) {
    future[k] = shared.futures[k];
    for (int i = S::kWarps - 1; i > warp; --i) future[k] = apply(shared.warp_maps[i][k], future[k]);
  }
#pragma unroll
  for (int i = 0; i < S::kWindows; ++i) {
    double after[2];
#pragma unroll
    for (int k = 0; k < kMaps; ++k) {
      const Affine x = k == 0 ? scans[i] : scan(elements[i].map(decays[k]), lane);
      const Affine later = shuffle_up(x, 1);
      after[k] = lane == 0 ? future[k] : apply(later, future[k]);
      future[k] = apply(shuffle(x, 31), future[k]);
    }
    elements[i].write(p, right - 32 * i, range.end, bootstrap, after[0], after[kMaps - 1], sums);
  }
  __syncthreads();  // the next stretch writes the shared cells again
}

// A tile meets at most two long trajectories: one through its first turn, one through its last. Returns its number.
template <class S, bool kTokens, bool kTwo>
__device__ __forceinline__ int64_t long_trajectories(const Problem& p, const Workspace& w, LongShared<S, kTwo>& shared, Sums& sums) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) shared.ticket = add_acquire_release(w.ticket, 1u);
  __syncthreads();
  const int64_t tile = w.tiles - 1 - shared.ticket;
  const int64_t low = tile * S::kTile, high = low + S::kTile < p.total ? low + S::kTile : p.total;
  bool published = false;
  int64_t b = trajectory_of(p, low, lane);
  for (int side = 0; side < 2; ++side) {
    const Range range = trajectory_range(p, b);
    if (range.end - range.begin > S::kTile && range.begin < high && range.end > low) {
      stretch<S, kTokens, kTwo>(p, w, shared, tile, range, b, sums);
      published = published || range.begin < low;
    }
    if (range.end >= high) break;
    const int64_t last = trajectory_of(p, high - 1, lane);
    if (last == b) break;
    b = last;
  }
  // Nobody waits for these if the offsets are sound. If they are not, nobody waits for ever.
  if (threadIdx.x == 0) {
    if (!published) store_release(w.tile_ready + tile, 1u);
    if (tile % S::kGroup == 0) store_release(w.group_ready + tile / S::kGroup, 1u);
  }
  return tile;
}

// ---------------------------------------------------------------------------------------------------------------- moments

template <class S>
struct MomentShared {
  Shared<Moments> warps[S::kWarps];
  Shared<unsigned> order;
};

// Merges the block's moments: lanes, then warps, in fixed order. The result is the first thread's.
template <class S>
__device__ __forceinline__ Moments merge_block(MomentShared<S>& shared, Moments m) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) m = merge(m, shuffle_down(m, by));
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < S::kWarps; ++i) m = merge(m, shared.warps[i]);
  }
  return m;
}

// The block that finishes last merges the parts of all, in the order of the parts.
template <class S>
__device__ __forceinline__ void finish_moments(const Problem& p, const Workspace& w, MomentShared<S>& shared, int64_t part, const Sums& sums) {
  const Moments own = merge_block<S>(shared, sums.finish());
  if (threadIdx.x == 0) {
    double* at = w.parts + 4 * part;
    store_payload(at, own.count);
    store_payload(at + 1, own.mean);
    store_payload(at + 2, own.m2);
    store_payload(at + 3, own.size);
    shared.order = add_acquire_release(w.finished, 1u);
  }
  __syncthreads();
  if (shared.order != static_cast<unsigned>(w.blocks() - 1)) return;
  Moments all{0.0, 0.0, 0.0, 0.0};
  for (int64_t i = threadIdx.x; i < w.blocks(); i += S::kThreads) {
    const double* at = w.parts + 4 * i;
    all = merge(all, Moments{load_payload(at), load_payload(at + 1), load_payload(at + 2), load_payload(at + 3)});
  }
  all = merge_block<S>(shared, all);
  if (threadIdx.x == 0) {
    p.moments[0] = all.count;
    p.moments[1] = all.mean;
    p.moments[2] = all.m2;
    p.moments[3] = all.size;
  }
}

template <class S, bool kTwo>
struct GaeShared {
  LongShared<S, kTwo> stretches;
  MomentShared<S> moments;
};

// Blocks [0, tiles) take a tile each, the others short trajectories. `kWidth`: lanes a short trajectory gets.
template <class S, bool kTokens, bool kTwo, int kWidth>
__global__ void __launch_bounds__(S::kThreads, kTwo ? 1 : 3) gae_kernel(Problem p, Workspace w) {
  using Storage = GaeShared<S, kTwo>;
  SAPO_SHARED(Storage, shared);
  Sums sums;
  int64_t part = blockIdx.x;
  if (part < w.tiles) {
    part = long_trajectories<S, kTokens, kTwo>(p, w, shared.stretches, sums);
  } else {
    short_trajectories<S, kTokens, kTwo, kWidth>(p, w, part - w.tiles, sums);
  }
  if (p.moments) finish_moments<S>(p, w, shared.moments, part, sums);
}

__global__ void __launch_bounds__(256) normalize_kernel(Scaling scaling) {
  const Normalizer normalizer = scaling.normalizer();
  for (int64_t t = int64_t{256} * blockIdx.x + threadIdx.x; t < scaling.total; t += int64_t{256} * gridDim.x) scaling.apply(normalizer, t);
}

}  // namespace sapo::cuda
