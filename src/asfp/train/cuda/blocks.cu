// Basic blocks of a residual network in training, for one width: 3x3 convolutions in steps of 1, batch norm, ReLU and
// the additions between them.
//
// A convolution reads a tile of the maps with a border of one pixel, applies what stands in front of it while reading
// (batch norm, ReLU, addition; in the backward pass batch norm's gradient), multiplies with tensor cores, and while
// writing adds up what the next batch norm needs. The last block of threads to end turns those sums into the factors
// that the next kernel reads. All sums have a fixed order: the same inputs give the same bits.

enum Back { FORWARD, THROUGH_RELU, THROUGH_BLOCK };

// out = conv(front(first, second)), with the sums for `norm`:
// FORWARD: of out and out^2. THROUGH_RELU: out is the gradient behind ReLU of the normalised `extra`; masked, its sums and
// those of its products with `extra`. THROUGH_BLOCK: `shortcut` is added, masked where `mask` is zero, sums as before.
template <Front front, Back back>
__device__ inline void convolve(
    const Chunk* first, const Chunk* second, const float* factors, Chunk* side, const uint4* weights, Chunk* out,
    const Chunk* extra, const float* extra_factors, const Chunk* shortcut, const Chunk* mask, float* sums, u32* ticket,
    Norm norm, int images, float momentum, float eps) {
  const Tile tile = tile_of(blockIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = blockIdx.y;
  read_tile<front, THREADS>(tile, images, first, second, factors, part == 0 ? side : nullptr);
  __syncthreads();
  float d[MF][NT][4] = {};
  const Chunk* corner[MF];
#pragma unroll
  for (int m = 0; m < MF; m++) corner[m] = shared + lane / 16 * PLANE + bordered((warp * MF + m) * 16 + lane % 16);
#pragma unroll
  for (int tap = 0; tap < 9; tap++)
#pragma unroll
    for (int k = 0; k < KS; k++) {
      uint4 b[NT / 2];
#pragma unroll
      for (int t = 0; t < NT / 2; t++)
        b[t] = weights[((tap * KS + k) * (C / 16) + part * (NT / 2) + t) * 32 + lane];
#pragma unroll
      for (int m = 0; m < MF; m++) {
        u32 a[4];
        load_matrices(a, corner[m] + 2 * k * PLANE + tap / 3 * (W + 2) + tap % 3);
#pragma unroll
        for (int t = 0; t < NT / 2; t++) {
          multiply(d[m][2 * t], a, b[t].x, b[t].y);
          multiply(d[m][2 * t + 1], a, b[t].z, b[t].w);
        }
      }
    }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < MF; m++)  // lane l has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int p = (warp * MF + m) * 16 + lane / 4 + 8 * h;
        shared[t * OUT + p].x[lane % 4] = pack(d[m][t][2 * h], d[m][t][2 * h + 1]);
      }
  __syncthreads();
  constexpr int STEP = THREADS / NT, EACH = PIXELS / STEP;
  const int eight = threadIdx.x % NT, channel = part * NT + eight;
  float s[2][8] = {}, f[3][8];
  if (back == THROUGH_RELU) read_factors<2>(f, extra_factors + channel * 8);
  Chunk raw[EACH], more[EACH], gate[EACH];
  const int from = (begin_of(tile) + threadIdx.x / NT) * EIGHTS + channel;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int at = from + e * STEP * EIGHTS;
    if (!is_there(tile, threadIdx.x / NT + e * STEP, images)) continue;
    if (back != FORWARD) raw[e] = extra[at];
    if (back == THROUGH_BLOCK) more[e] = shortcut[at], gate[e] = mask[at];
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if (!is_there(tile, threadIdx.x / NT + e * STEP, images)) continue;
    Chunk value = shared[eight * OUT + threadIdx.x / NT + e * STEP];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v[2] = {low(value.x[i]), high(value.x[i])}, y[2] = {v[0], v[1]};
      if (back != FORWARD) y[0] = low(raw[e].x[i]), y[1] = high(raw[e].x[i]);
      if (back == THROUGH_RELU) {
        v[0] = y[0] * f[0][2 * i] + f[1][2 * i] > 0.0f ? v[0] : 0.0f;
        v[1] = y[1] * f[0][2 * i + 1] + f[1][2 * i + 1] > 0.0f ? v[1] : 0.0f;
      } else if (back == THROUGH_BLOCK) {
        v[0] = low(gate[e].x[i]) > 0.0f ? v[0] + low(more[e].x[i]) : 0.0f;
        v[1] = high(gate[e].x[i]) > 0.0f ? v[1] + high(more[e].x[i]) : 0.0f;
      }
      if (back != FORWARD) value.x[i] = pack(v[0], v[1]);
      if (back == THROUGH_BLOCK) v[0] = low(value.x[i]), v[1] = high(value.x[i]);  // as others will read it
#pragma unroll
      for (int j = 0; j < 2; j++) {
        s[0][2 * i + j] += v[j];
        s[1][2 * i + j] += v[j] * y[j];
      }
    }
    out[from + e * STEP * EIGHTS] = value;
  }
  add_up<back != FORWARD, NC, THREADS>(s, sums ? sums + part * gridDim.x * 2 * NC : nullptr, ticket + part, part * NC,
                                       norm, 1.0 / ((double)images * H * W), momentum, eps);
}

#define CONVOLUTION(name, front, back)                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS) name(                                                         \
      const Chunk* first, const Chunk* second, const float* factors, Chunk* side, const uint4* weights, Chunk* out,   \
      const Chunk* extra, const float* extra_factors, const Chunk* shortcut, const Chunk* mask, float* sums,          \
      u32* ticket, const float* gamma, const float* beta, float* mean, float* var, float* stat, float* slopes,        \
      int images, float momentum, float eps) {                                                                        \
    const Norm norm = {gamma, beta, mean, var, stat, slopes};                                                         \
    convolve<front, back>(first, second, factors, side, weights, out, extra, extra_factors, shortcut, mask, sums,     \
                          ticket, norm, images, momentum, eps);                                                       \
  }

CONVOLUTION(forward_first, NORM_ADD_RELU, FORWARD)
CONVOLUTION(forward_second, NORM_RELU, FORWARD)
CONVOLUTION(backward_second, NORM_GRADIENT, THROUGH_RELU)
CONVOLUTION(backward_first, NORM_GRADIENT, THROUGH_BLOCK)

constexpr int PLAIN_THREADS = 256;

// The sums of y and y^2, for the batch norm behind a convolution that another library computed.
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS) statistics(
    const Chunk* y, int pixels, float* sums, u32* ticket, const float* gamma, const float* beta, float* mean,
    float* var, float* stat, float momentum, float eps) {
  float s[2][8] = {};
  for (int i = blockIdx.x * PLAIN_THREADS + threadIdx.x; i < pixels * EIGHTS; i += gridDim.x * PLAIN_THREADS) {
    const Chunk value = y[i];
    for (int c = 0; c < 8; c++) {
      const float v = c % 2 ? high(value.x[c / 2]) : low(value.x[c / 2]);
      s[0][c] += v;
      s[1][c] += v * v;
    }
  }
  const Norm norm = {gamma, beta, mean, var, stat, nullptr};
  add_up<false, C, PLAIN_THREADS>(s, sums, ticket, 0, norm, 1.0 / pixels, momentum, eps);
}

// out = relu(scale y + shift + shortcut)
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS) end_of_block(
    const Chunk* y, const Chunk* shortcut, const float* factors, Chunk* out, int pixels) {
  const int eight = threadIdx.x % EIGHTS;
  float f[3][8];
  read_factors<2>(f, factors + eight * 8);
  for (int i = blockIdx.x * PLAIN_THREADS + threadIdx.x; i < pixels * EIGHTS; i += gridDim.x * PLAIN_THREADS) {
    const bool has = shortcut != nullptr;
    out[i] = in_front<NORM_ADD_RELU>(y[i], has ? shortcut[i] : y[i], has, f);
  }
}

// g = slope where out > 0, with the sums of g and g y
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS) begin_backward(
    const Chunk* slope, const Chunk* mask, const Chunk* y, Chunk* g, int pixels, float* sums, u32* ticket, float* stat,
    float* slopes) {
  float s[2][8] = {};
  for (int i = blockIdx.x * PLAIN_THREADS + threadIdx.x; i < pixels * EIGHTS; i += gridDim.x * PLAIN_THREADS) {
    const Chunk given = slope[i], gate = mask[i], raw = y[i];
    Chunk masked;
    for (int k = 0; k < 4; k++) {
      const float a = low(gate.x[k]) > 0.0f ? low(given.x[k]) : 0.0f, b = high(gate.x[k]) > 0.0f ? high(given.x[k]) : 0.0f;
      masked.x[k] = pack(a, b);
      s[0][2 * k] += a;
      s[0][2 * k + 1] += b;
      s[1][2 * k] += a * low(raw.x[k]);
      s[1][2 * k + 1] += b * high(raw.x[k]);
    }
    g[i] = masked;
  }
  const Norm norm = {nullptr, nullptr, nullptr, nullptr, stat, slopes};
  add_up<true, C, PLAIN_THREADS>(s, sums, ticket, 0, norm, 1.0 / pixels, 0.0f, 0.0f);
}

// dy = a g + b y + d
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS) norm_gradient(
    const Chunk* g, const Chunk* y, const float* factors, Chunk* dy, int pixels) {
  const int eight = threadIdx.x % EIGHTS;
  float f[3][8];
  read_factors<3>(f, factors + eight * 8);
  for (int i = blockIdx.x * PLAIN_THREADS + threadIdx.x; i < pixels * EIGHTS; i += gridDim.x * PLAIN_THREADS)
    dy[i] = in_front<NORM_GRADIENT>(g[i], y[i], true, f);
}
