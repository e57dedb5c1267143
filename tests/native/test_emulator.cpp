// The emulator itself: small kernels, right ones and broken ones. Each broken one must end its process with the emulator's status and words.
#include "cuda/device.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace {

using namespace sapo::cuda;

constexpr unsigned kFull = 0xffffffffu;

struct Line {
  Shared<int> cells[64];
};

// Every thread writes a cell and reads another's.
void rotate(int* out, bool barrier) {
  SAPO_SHARED(Line, line);
  const int t = static_cast<int>(threadIdx.x);
  line.cells[t] = 10 * t;
  if (barrier) __syncthreads();
  out[64 * blockIdx.x + t] = line.cells[(t + 40) % 64];
}

// The same within warps, where __syncwarp is enough.
void rotate_in_warp(int* out, bool barrier) {
  SAPO_SHARED(Line, line);
  const int t = static_cast<int>(threadIdx.x), warp = t / 32 * 32;
  line.cells[t] = 10 * t;
  if (barrier) __syncwarp();
  out[t] = line.cells[warp + (t + 5) % 32];
}

// A cell written again while others may still read it.
void write_after_read(int* out, bool barrier) {
  SAPO_SHARED(Line, line);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) line.cells[0] = 1;
  __syncthreads();
  out[t] = line.cells[0];
  if (barrier) __syncthreads();
  if (t == 1) line.cells[0] = 2;
}

void sum_by_shuffles(int* out) {
  int x = static_cast<int>(threadIdx.x);
  for (int by = 16; by > 0; by /= 2) x += __shfl_down_sync(kFull, x, by);
  const unsigned odd = __ballot_sync(kFull, threadIdx.x % 2 == 1);
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = odd == 0xaaaaaaaau ? x : -1;
}

void divergent(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 0;
  if (threadIdx.x >= 32) __syncthreads();
}

void half_warp(int* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(kFull, 1, 0);
  else __syncthreads();
}

struct Mail {
  unsigned ready = 0, ticket = 0;
  double payload[4] = {0, 0, 0, 0};
};

// The block with the first ticket sends, the others receive.
void send(Mail& mail, double* out, bool release) {
  SAPO_SHARED(Line, line);
  if (threadIdx.x == 0) {
    line.cells[0] = static_cast<int>(add_acquire_release(&mail.ticket, 1));
    if (line.cells[0] == 0) {
      for (int i = 0; i < 4; ++i) store_payload(mail.payload + i, i + 1.0);
      if (release) {
        store_release(&mail.ready, 1);
      } else {
        mail.ready = 1;
      }
    } else {
      while (load_acquire(&mail.ready) == 0) spin_pause();
      double sum = 0.0;
      for (int i = 0; i < 4; ++i) sum += load_payload(mail.payload + i);
      out[blockIdx.x] = sum;
    }
  }
}

// Waits for block 0, which may start last.
void wait_for_block_zero(Mail& mail) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    store_release(&mail.ready, 1);
  } else {
    while (load_acquire(&mail.ready) == 0) spin_pause();
  }
}

struct Letters {
  Shared<int> from[4];
};

// Every block of a cluster of four sends its number to the next. `first`, `second`: keep the cluster's barriers; `release`: the second orders memory.
void pass_on(int* out, bool first, bool second, bool release) {
  SAPO_SHARED(Letters, letters);
  const int rank = static_cast<int>(blockIdx.x % 4), next = (rank + 1) % 4;
  if (first) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
  if (threadIdx.x == 0) store_remote(letters.from[rank], next, static_cast<int>(blockIdx.x));
  if (second) {
    if (release) {
      cluster_arrive();
    } else {
      cluster_arrive_relaxed();
    }
    cluster_wait();
  }
  if (threadIdx.x == 1) out[blockIdx.x] = letters.from[(rank + 3) % 4];
}

int failures = 0;

void expect(bool good, const std::string& what) {
  std::printf("%s: %s\n", good ? "ok  " : "FAIL", what.c_str());
  failures += !good;
}

template <class F>
void expect_fault(const std::string& words, const std::string& what, F body) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    close(ends[0]);
    body();
    std::_Exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[256];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 3 && said.find(words) != std::string::npos, what + " -> " + words);
}

bool rotated(const std::vector<int>& out, int period, int by) {
  for (int t = 0; t < static_cast<int>(out.size()); ++t) {
    const int local = t % 64, group = local / period * period;
    if (out[static_cast<size_t>(t)] != 10 * (group + (local - group + by) % period)) return false;
  }
  return true;
}

}  // namespace

int main() {
  std::vector<int> out(128, -1);
  bool all = true;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    std::fill(out.begin(), out.end(), -1);
    emul::launch(2, 64, {seed, 2}, [&] { rotate(out.data(), true); });
    all = all && rotated(out, 64, 40);
    emul::launch(1, 64, {seed, 1}, [&] { rotate_in_warp(out.data(), true); });
    all = all && rotated({out.begin(), out.begin() + 64}, 32, 5);
    emul::launch(1, 64, {seed, 1}, [&] { write_after_read(out.data(), true); });
    all = all && std::all_of(out.begin(), out.begin() + 64, [](int x) { return x == 1; });
    emul::launch(1, 64, {seed, 1}, [&] { sum_by_shuffles(out.data()); });
    all = all && out[0] == 496 && out[1] == 1520;
    Mail mail;
    std::vector<double> sums(6, 10.0);
    emul::launch(6, 32, {seed, 4}, [&] { send(mail, sums.data(), true); });
    all = all && std::all_of(sums.begin(), sums.end(), [](double x) { return x == 10.0; });
  }
  for (unsigned seed = 1; seed <= 20; ++seed) {
    emul::launch(8, 32, {seed, 1 + seed % 9, 100000, 4}, [&] { pass_on(out.data(), true, true, true); });
    for (int block = 0; block < 8; ++block) all = all && out[static_cast<size_t>(block)] == block / 4 * 4 + (block + 3) % 4;
  }
  expect(all, "right kernels run, whatever the schedule");

  expect_fault("race: shared memory read", "a missing block barrier", [&] { emul::launch(1, 64, {1, 1}, [&] { rotate(out.data(), false); }); });
  expect_fault("race: shared memory", "a missing warp barrier", [&] { emul::launch(1, 64, {1, 1}, [&] { rotate_in_warp(out.data(), false); }); });
  expect_fault("race: shared memory", "a missing barrier before a second write",
               [&] { emul::launch(1, 64, {1, 1}, [&] { write_after_read(out.data(), false); }); });
  expect_fault("different barriers", "a barrier in two branches", [&] { emul::launch(1, 64, {1, 1}, [&] { divergent(out.data()); }); });
  expect_fault("deadlock", "a shuffle that half the warp misses", [&] { emul::launch(1, 64, {1, 1}, [&] { half_warp(out.data()); }); });
  expect_fault("never ends", "a wait for a block that cannot start", [&] {
    Mail mail;
    for (unsigned seed = 1; seed <= 20; ++seed) emul::launch(4, 32, {seed, 2, 100000}, [&] { mail.ready = 0, wait_for_block_zero(mail); });
  });
  const auto passed_on = [&](bool first, bool second, bool release) {
    for (unsigned seed = 1; seed <= 20; ++seed) emul::launch(4, 32, {seed, 1, 100000, 4}, [&] { pass_on(out.data(), first, second, release); });
  };
  expect_fault("before it is known to run", "a cluster whose blocks do not wait for each other", [&] { passed_on(false, true, true); });
  expect_fault("race: shared memory read", "a missing cluster barrier", [&] { passed_on(true, false, true); });
  expect_fault("race: shared memory read", "a cluster barrier without a release", [&] { passed_on(true, true, false); });
  bool torn = false;
  for (unsigned seed = 1; seed <= 50; ++seed) {
    Mail mail;
    std::vector<double> sums(6, 10.0);
    emul::launch(6, 32, {seed, 4}, [&] { send(mail, sums.data(), false); });
    torn = torn || std::any_of(sums.begin(), sums.end(), [](double x) { return x != 10.0; });
  }
  expect(torn, "without a release, others see part of a message");
  return failures != 0;
}
