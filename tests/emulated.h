// A block of CUDA threads on a CPU: one fibre a thread, which waits for others where CUDA's threads would. Stands in for
// src/asfp/train/cuda/warp.cuh and for what the language has built in, so that the kernels' own source can be run.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x, y; };

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(n)

struct Group { int size = 0, count = 0, phase = 0; };
struct Fibre {
  ucontext_t context;
  Index thread;
  bool done = false;
  std::vector<char> stack;
  u32 words[8];  // what a lane shows to its warp
  const void* row;
};

static std::vector<Fibre> fibres;
static std::vector<Group> warps;
static Group block;
static Fibre* current;
static ucontext_t scheduler;
static Index blockIdx, gridDim;
static std::function<void()> body;
#define threadIdx (current->thread)

static void yield() { swapcontext(&current->context, &scheduler); }

static long moves;  // how often a fibre came to a meeting, or left one

static void meet(Group& group) {
  const int phase = group.phase;
  moves++;
  if (++group.count == group.size) {
    group.count = 0;
    group.phase++;
  } else {
    while (group.phase == phase) yield();
    moves++;
  }
}

static void __syncthreads() { meet(block); }
static u32 take(u32* ticket) { return (*ticket)++; }

static void enter() {
  body();
  current->done = true;
  // threads that have ended count as arrived, as in CUDA
  if (--block.size > 0 && block.count == block.size) { block.count = 0; block.phase++; }
  yield();
}

static void run_block(int threads) {
  fibres.resize(threads);
  warps.assign(threads / 32, Group{32});
  block = Group{threads};
  int left = threads;
  for (int i = 0; i < threads; i++) {
    Fibre& f = fibres[i];
    f.stack.resize(1 << 16);
    f.thread = {i, 0};
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  // one warp as far as it gets, the last one first: a missing barrier is then a wrong result
  while (left > 0)
    for (int first = threads - 32; first >= 0; first -= 32)
      for (long before = -1; before != moves;) {
        before = moves;
        for (int i = first; i < first + 32; i++) {
          if (fibres[i].done) continue;
          current = &fibres[i];
          swapcontext(&scheduler, &current->context);
          if (current->done) left--, moves++;
        }
      }
}

static float as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static float low(u32 pair) { return as_float(pair << 16); }
static float high(u32 pair) { return as_float(pair & 0xffff0000u); }
static u32 rounded(float value) {  // to the nearest bfloat16, ties to even
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
static u32 pack(float first, float second) { return rounded(first) | rounded(second) << 16; }
static float fresh(const float* p) { return *p; }

static Group& warp() { return warps[current->thread.x / 32]; }
static Fibre& lane(int i) { return fibres[current->thread.x / 32 * 32 + i]; }

static float from_lane_xor(float value, int mask) {
  std::memcpy(&current->words[0], &value, 4);
  meet(warp());
  const float other = as_float(lane(current->thread.x % 32 ^ mask).words[0]);
  meet(warp());
  return other;
}

static void matrices(u32 (&a)[4], const void* row, bool transposed) {
  current->row = row;
  meet(warp());
  const int l = current->thread.x % 32;
  for (int m = 0; m < 4; m++) {
    uint16_t pair[2];
    for (int j = 0; j < 2; j++) {
      const int r = transposed ? l % 4 * 2 + j : l / 4, c = transposed ? l / 4 : l % 4 * 2 + j;
      pair[j] = ((const uint16_t*)lane(m * 8 + r).row)[c];
    }
    a[m] = pair[0] | (u32)pair[1] << 16;
  }
  meet(warp());
}
static void load_matrices(u32 (&a)[4], const void* row) { matrices(a, row, false); }
static void load_transposed(u32 (&a)[4], const void* row) { matrices(a, row, true); }

static float half_of(u32 pair, int second) { return second ? high(pair) : low(pair); }

static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  std::memcpy(current->words, a, 16);
  current->words[4] = b0;
  current->words[5] = b1;
  meet(warp());
  const int l = current->thread.x % 32;
  for (int i = 0; i < 4; i++) {
    const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; k++) {
      const u32 from_a = lane(row % 8 * 4 + k % 8 / 2).words[row / 8 + k / 8 * 2];
      const u32 from_b = lane(column * 4 + k % 8 / 2).words[4 + k / 8];
      sum += half_of(from_a, k % 2) * half_of(from_b, k % 2);
    }
    d[i] += sum;
  }
  meet(warp());
}

// what lies behind a block's shared memory must stay as it is
static void guard(char* shared, size_t bytes, size_t all) { std::memset(shared + bytes, 0x5a, all - bytes); }
static int broken(const char* shared, size_t bytes, size_t all) {
  for (size_t i = bytes; i < all; i++)
    if (shared[i] != 0x5a) return 1;
  return 0;
}
