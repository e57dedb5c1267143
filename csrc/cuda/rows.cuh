// The row pass on the GPU. One block, or one cluster of blocks, a token.
//
//   resident   the row is read once into registers, a share a thread; statistics go up through warps, blocks and, by distributed shared memory,
//              the blocks of a cluster (sm_90 and later); the loss' slopes are made on the spot and the gradient is written: 1 read and 1 write.
//   stream     for what does not fit, and for statistics or gradient alone: a block walks the row; statistics and gradient at once read it twice.
//
// Every sum is taken in one order, fixed by the width of the row and its alignment: no atomics, the same bits in every run and whatever rows stand beside it.
// A thread writes only columns that it read itself, so the gradient may go over the logits.
#pragma once

#include "device.h"
#include "rows.h"

namespace sapo::cuda {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// ------------------------------------------------------------------------------------------------------------------- vectors

// 16 bytes of a row, in registers. Lanes are known when compiling: registers have no address.
struct Float32 {
  using Storage = uint32_t;
  static constexpr int kLanes = 4;
  static constexpr Storage kMinusInfinity = 0xff800000u;

  __device__ __forceinline__ static float widen(Storage x) { return bits_to_float(x); }
  __device__ __forceinline__ static Storage narrow(float x) { return float_to_bits(x); }
  __device__ __forceinline__ static Storage get(const Vector& v, int lane) { return v.word[lane]; }
  __device__ __forceinline__ static void put(Vector& v, int lane, Storage x) { v.word[lane] = x; }
  __device__ __forceinline__ static uint32_t larger(uint32_t x, uint32_t y) { return float_to_bits(fmaxf(bits_to_float(x), bits_to_float(y))); }
};

template <class Half>
struct Packed {
  using Storage = uint16_t;
  static constexpr int kLanes = 8;

  __device__ __forceinline__ static Storage get(const Vector& v, int lane) { return static_cast<Storage>(v.word[lane / 2] >> (16 * (lane % 2))); }
  __device__ __forceinline__ static void put(Vector& v, int lane, Storage x) {
    const int at = 16 * (lane % 2);
    v.word[lane / 2] = (v.word[lane / 2] & ~(0xffffu << at)) | static_cast<uint32_t>(x) << at;
  }
};

struct Float16 : Packed<Float16> {
  static constexpr Storage kMinusInfinity = 0xfc00u;

  __device__ __forceinline__ static float widen(Storage x) { return half_to_float(x); }
  __device__ __forceinline__ static Storage narrow(float x) { return float_to_half(x); }
  __device__ __forceinline__ static uint32_t larger(uint32_t x, uint32_t y) { return larger_halves(x, y); }
};

struct BFloat16 : Packed<BFloat16> {
  static constexpr Storage kMinusInfinity = 0xff80u;

  __device__ __forceinline__ static float widen(Storage x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
  __device__ __forceinline__ static Storage narrow(float x) { return float_to_bfloat(x); }
  __device__ __forceinline__ static uint32_t larger(uint32_t x, uint32_t y) { return larger_bfloats(x, y); }
};

// One row. Vectors are counted from the 16-byte boundary at or before its first column, `shift` columns earlier.
template <class D>
struct Row {
  using Storage = typename D::Storage;

  Storage* data;
  int64_t stride;  // between columns
  int width, shift;

  __device__ __forceinline__ Row(const Matrix& m, int64_t row, int width)
      : data(static_cast<Storage*>(m.data) + row * m.row_stride), stride(m.column_stride), width(width), shift(0) {
    if (stride == 1) shift = static_cast<int>(reinterpret_cast<uintptr_t>(data) % sizeof(Vector) / sizeof(Storage));
  }

  __device__ __forceinline__ int vectors() const { return (width + shift + D::kLanes - 1) / D::kLanes; }
  __device__ __forceinline__ int first_of(int vector) const { return vector * D::kLanes - shift; }

  // Do the columns from `first` on make one aligned vector?
  __device__ __forceinline__ bool whole(int first) const {
    return stride == 1 && first >= 0 && first + D::kLanes <= width && (first + shift) % D::kLanes == 0;
  }

  __device__ __forceinline__ float at(int64_t column) const { return D::widen(data[column * stride]); }
};

// Puts `x` where `column` lies in a vector that begins at `first`.
template <class D>
__device__ __forceinline__ void patch(Vector& v, int first, int column, typename D::Storage x) {
  const int lane = column - first;
  if (lane < 0 || lane >= D::kLanes) return;
#pragma unroll
  for (int j = 0; j < D::kLanes; ++j) {
    if (j == lane) D::put(v, j, x);
  }
}

// -inf beyond the ends of the row and at w+ and w-.
template <class D>
__device__ __forceinline__ Vector load(const Row<D>& row, int first, const RowsProblem& p) {
  Vector v;
  if (row.whole(first)) {
    v = load_streaming(row.data + first);
  } else {
#pragma unroll
    for (int j = 0; j < D::kLanes; ++j) {
      const int column = first + j;
      D::put(v, j, column >= 0 && column < row.width ? row.data[column * row.stride] : D::kMinusInfinity);
    }
  }
  patch<D>(v, first, p.plus, D::kMinusInfinity);
  patch<D>(v, first, p.minus, D::kMinusInfinity);
  return v;
}

template <class D>
__device__ __forceinline__ void store(const Row<D>& row, int first, const Vector& v) {
  if (row.whole(first)) {
    store_streaming(row.data + first, v);
  } else {
#pragma unroll
    for (int j = 0; j < D::kLanes; ++j) {
      const int column = first + j;
      if (column >= 0 && column < row.width) row.data[column * row.stride] = D::get(v, j);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- statistics

template <class D, int kVectors>
__device__ __forceinline__ RowPart<float> part_of(const Vector (&v)[kVectors], float cold) {
  Vector most = v[0];  // in the row's own type: unpacking for this and again for the sums would hold on to registers
#pragma unroll
  for (int k = 1; k < kVectors; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most.word[i] = D::larger(most.word[i], v[k].word[i]);
  }
  RowPart<float> part;
#pragma unroll
  for (int j = 0; j < D::kLanes; ++j) part.top = fmaxf(part.top, D::widen(D::get(most, j)));
  const float pivot = part.top == -kInfinity<float> ? 0.0f : part.top;
  const float to_log2 = cold * kLog2E, floor = Floor<float>::value * kLog2E;
  float rest = 0.0f, slope = 0.0f;
  int at_top = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float e_sum = 0.0f, de_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < D::kLanes; ++j) {
      float d = (D::widen(D::get(v[k], j)) - pivot) * to_log2;
      d = d < floor ? floor : d;
      const float e = exp2_fast(d);
      if (d == 0.0f) {
        ++at_top;
      } else {
        e_sum += e;
      }
      de_sum += d * e;
    }
    rest += e_sum;
    slope += de_sum;
  }
  part.rest = rest + static_cast<float>(at_top - 1);
  part.slope = slope * kLn2;
  return part;
}

// Of `kLanes` lanes; the result is lane 0's.
template <int kLanes = 32>
__device__ __forceinline__ RowPart<float> merge_lanes(RowPart<float> part, float cold) {
#pragma unroll
  for (int by = 1; by < kLanes; by *= 2) {
    const RowPart<float> other{__shfl_down_sync(kAll, part.top, by), __shfl_down_sync(kAll, part.rest, by),
                               __shfl_down_sync(kAll, part.slope, by)};
    part = merge(part, other, cold);
  }
  return part;
}

// What the gradient of a row needs; slopes are divided by the temperature.
struct Slopes {
  float top, log_sum, spread, a, b, at_action;
};

// Statistics of token i, and its slopes from the loss or as given.
template <bool kStats>
__device__ __forceinline__ RowNumbers<float> numbers_of(const RowsProblem& p, int64_t i, RowPart<float> row, float taken) {
  if constexpr (kStats) return finish(row, taken, p.temperature);
  return {p.logprob[i], p.top[i], p.log_sum[i], p.spread[i]};
}

template <bool kStats>
__device__ __forceinline__ Slopes slopes_of(const RowsProblem& p, int64_t i, const RowNumbers<float>& row) {
  float a, b, same;
  if constexpr (kStats) {
    const double scale = *p.scale;
    a = static_cast<float>(policy_slope(p.loss, p.tokens, i, row.logprob) * scale) / p.temperature;
    b = static_cast<float>(p.loss.entropy_coef * scale) / p.temperature;
    same = a;
  } else {
    a = p.a[i] / p.temperature;
    b = p.b ? p.b[i] / p.temperature : 0.0f;
    same = p.same ? p.same[i] / p.temperature : a;
  }
  return {row.top, row.log_sum, row.spread, a, b, slope_at_action(row, a, b, same)};
}

__device__ __forceinline__ void write_numbers(const RowsProblem& p, int64_t i, const RowNumbers<float>& row) {
  p.logprob[i] = row.logprob;
  p.top[i] = row.top;
  p.log_sum[i] = row.log_sum;
  p.spread[i] = row.spread;
}

// ------------------------------------------------------------------------------------------------------------------ gradient

// The gradient of one vector, on its way out.
template <class D>
__device__ __forceinline__ void write_gradient(const RowsProblem& p, const Row<D>& out, Vector v, int first, const Slopes& s, float cold, int64_t action) {
  if (s.a == 0.0f && s.b == 0.0f) {
    v = Vector{{0u, 0u, 0u, 0u}};
  } else {
#pragma unroll
    for (int j = 0; j < D::kLanes; ++j) {
      const float d = floored(fmaf(D::widen(D::get(v, j)), cold, -s.top));
      const float q = exp2_fast((d - s.log_sum) * kLog2E);
      D::put(v, j, D::narrow(slope_at(q, d, s.a, s.b, s.spread)));
    }
  }
  patch<D>(v, first, p.plus, 0);
  patch<D>(v, first, p.minus, 0);
  if (action >= 0 && action < out.width) patch<D>(v, first, static_cast<int>(action), D::narrow(s.at_action));
  store(out, first, v);
}

// The row of token i, or -1: nothing to do.
__device__ __forceinline__ int64_t row_of(const RowsProblem& p, int64_t i) {
  const int64_t row = p.rows ? p.rows[i] : i;
  return row >= 0 && row < p.height ? row : -1;
}

template <class D>
__device__ __forceinline__ float taken_from(const RowsProblem& p, const Row<D>& row, int64_t action) {
  if (action < 0 || action >= p.width) return kNaN<float>;
  if (action == p.plus || action == p.minus) return -kInfinity<float>;
  return row.at(action);
}

// ------------------------------------------------------------------------------------------------------------------- kernels

inline constexpr int kMostWarps = 20, kMostCluster = 8;  // of a block; blocks of a cluster

// Threads the registers of an SM are cut for: 64 each, so that three blocks of V = 151,936 share one. The compiler for sm_100 needs 96.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kThreadsPerSM = 32 * kMostWarps;
#else
inline constexpr int kThreadsPerSM = 1024;
#endif

struct RowShared {
  Shared<RowPart<float>> warps[kMostWarps];
  Shared<RowPart<float>> blocks[kMostCluster];  // of the cluster, in order; others write here
  Shared<Slopes> slopes;
};

// Statistics, slopes and gradient of a row held in registers: kVectors vectors a thread, by all threads of `cluster` blocks.
template <class D, int kVectors, bool kCluster>
__global__ void __launch_bounds__(kThreadsPerSM, 1) resident_kernel(RowsProblem p, int blocks) {
  SAPO_SHARED(RowShared, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int cluster = kCluster ? blocks : 1;
  const int i = static_cast<int>(blockIdx.x) / cluster, rank = static_cast<int>(blockIdx.x) % cluster;
  const int64_t at = row_of(p, i);
  if (at < 0) return;  // all blocks of the cluster alike
  if constexpr (kCluster) cluster_arrive_relaxed();
  const float cold = 1.0f / p.temperature;
  const Row<D> in(p.logits, at, p.width);
  const float taken = threadIdx.x == 0 ? taken_from(p, in, p.actions[i]) : 0.0f;  // before anyone writes the gradient over it

  const int own = rank * static_cast<int>(blockDim.x) * kVectors + static_cast<int>(threadIdx.x);
  Vector v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) v[k] = load(in, in.first_of(own + k * static_cast<int>(blockDim.x)), p);
  RowPart<float> part = merge_lanes(part_of<D>(v, cold), cold);
  if (lane == 0) shared.warps[warp] = part;
  if constexpr (kCluster) cluster_wait();  // the other blocks run: their shared memory is there
  __syncthreads();
  if (warp == 0) {
    part = RowPart<float>{};
    if (lane < warps) part = shared.warps[lane];
    part = merge_lanes(part, cold);
    if constexpr (kCluster) {
      part = {__shfl_sync(kAll, part.top, 0), __shfl_sync(kAll, part.rest, 0), __shfl_sync(kAll, part.slope, 0)};
      if (lane < cluster) store_remote(shared.blocks[rank], lane, part);
    }
  }
  if constexpr (kCluster) {
    cluster_arrive();
    cluster_wait();
  }
  if (warp == 0) {
    if constexpr (kCluster) {
      part = RowPart<float>{};
      if (lane < cluster) part = shared.blocks[lane];
      part = merge_lanes<kMostCluster>(part, cold);
    }
    if (lane == 0) {
      const RowNumbers<float> numbers = finish(part, taken, p.temperature);
      if (rank == 0) write_numbers(p, i, numbers);
      shared.slopes = slopes_of<true>(p, i, numbers);
    }
  }
  __syncthreads();
  // Looked up again: what lives across the barriers takes registers from the row.
  const Slopes slopes = shared.slopes;
  const int64_t again = row_of(p, i), action = p.actions[i];
  const Row<D> out(p.out, again, p.width);
  const int shift = Row<D>(p.logits, again, p.width).shift;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int first = (own + k * static_cast<int>(blockDim.x)) * D::kLanes - shift;
    if (first < p.width) write_gradient(p, out, v[k], first, slopes, cold, action);
  }
}

// A block walks the row: for its statistics, for its gradient, or for both.
template <class D, bool kStats, bool kGrad>
__global__ void __launch_bounds__(512, 2) stream_kernel(RowsProblem p) {
  constexpr int kAtOnce = 4;
  SAPO_SHARED(RowShared, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t i = blockIdx.x;
  const int64_t at = row_of(p, i);
  if (at < 0 || (p.first && p.first[i] != i)) return;
  const float cold = 1.0f / p.temperature;
  const int64_t action = p.actions[i];
  const Row<D> in(p.logits, at, p.width);
  const int vectors = in.vectors(), threads = static_cast<int>(blockDim.x);

  RowPart<float> part;
  if constexpr (kStats) {
    for (int from = static_cast<int>(threadIdx.x); from < vectors; from += kAtOnce * threads) {
      Vector v[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) v[k] = load(in, in.first_of(from + k * threads), p);
      part = merge(part, part_of<D>(v, cold), cold);
    }
    part = merge_lanes(part, cold);
    if (lane == 0) shared.warps[warp] = part;
    __syncthreads();
    if (warp == 0) {
      part = RowPart<float>{};
      if (lane < warps) part = shared.warps[lane];
      part = merge_lanes(part, cold);
    }
  }
  if (threadIdx.x == 0) {
    const RowNumbers<float> numbers = numbers_of<kStats>(p, i, part, kStats ? taken_from(p, in, action) : 0.0f);
    if constexpr (kStats) write_numbers(p, i, numbers);
    if constexpr (kGrad) shared.slopes = slopes_of<kStats>(p, i, numbers);
  }
  if constexpr (kGrad) {
    __syncthreads();
    const Slopes slopes = shared.slopes;
    const bool zero = slopes.a == 0.0f && slopes.b == 0.0f;  // then the row is not read
    const Row<D> out(p.out, at, p.width);
    for (int from = static_cast<int>(threadIdx.x); from < vectors; from += kAtOnce * threads) {
      Vector v[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) v[k] = zero ? Vector{{0u, 0u, 0u, 0u}} : load(in, in.first_of(from + k * threads), p);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int first = in.first_of(from + k * threads);
        if (first < p.width) write_gradient(p, out, v[k], first, slopes, cold, action);
      }
    }
  }
}

// Where rows repeat: the entries at the actions of all tokens, after the rows themselves.
template <class D>
__global__ void __launch_bounds__(256) actions_kernel(RowsProblem p) {
  const int64_t i = int64_t{256} * blockIdx.x + threadIdx.x;
  if (i >= p.count) return;
  const int64_t at = row_of(p, i), action = p.actions[i];
  if (at < 0 || action < 0 || action >= p.width || action == p.plus || action == p.minus) return;
  const Row<D> out(p.out, at, p.width);
  out.data[action * out.stride] = D::narrow(slopes_of<false>(p, i, numbers_of<false>(p, i, {}, 0.0f)).at_action);
}

template <class D>
__global__ void __launch_bounds__(256) scale_kernel(Matrix x, int width, const double* factor) {
  const float by = static_cast<float>(*factor);
  if (by == 1.0f) return;
  const Row<D> row(x, blockIdx.x, width);
  for (int k = static_cast<int>(threadIdx.x); k < row.vectors(); k += static_cast<int>(blockDim.x)) {
    const int first = row.first_of(k);
    Vector v{{0u, 0u, 0u, 0u}};
    if (row.whole(first)) {
      v = load_streaming(row.data + first);
    } else {
#pragma unroll
      for (int j = 0; j < D::kLanes; ++j) {
        if (first + j >= 0 && first + j < width) D::put(v, j, row.data[(first + j) * row.stride]);
      }
    }
#pragma unroll
    for (int j = 0; j < D::kLanes; ++j) D::put(v, j, D::narrow(D::widen(D::get(v, j)) * by));
    store(row, first, v);
  }
}

// How many blocks share a row, and their threads; host arithmetic, shared with the tests.
struct ResidentPlan {
  int cluster = 0, threads = 0;  // 0: the row does not fit

  // `vectors`: 16-byte vectors of a row at most; `most`: blocks a cluster may have.
  ResidentPlan(int64_t vectors, int vectors_per_thread, int most) {
    for (int limit : {512, 32 * kMostWarps}) {  // up to 512 threads two rows share an SM and hide each other's waiting
      for (cluster = 1; cluster <= most; cluster *= 2) {
        const int64_t a_warp = int64_t{32} * vectors_per_thread * cluster;
        threads = static_cast<int>((vectors + a_warp - 1) / a_warp < 64 ? (vectors + a_warp - 1) / a_warp * 32 : 2048);
        if (threads <= limit) return;
      }
    }
    cluster = threads = 0;
  }
};

}  // namespace sapo::cuda
