// The gradients of 3x3 weights, and the weights in the order in which the convolutions read them.

// A warp has the gradient of 16 output and 16 input channels, for all nine taps; the warps share them out, and, where
// there are more warps than such squares, the pixels.
constexpr int SQUARES = (C / 16) * (C / 16), HERE = SQUARES < 8 ? SQUARES : 8, SHARES = 8 / HERE;
constexpr int SIZE = 9 * C * C, SQUARE = 9 * 256;

// parts[block, co, tap, ci] = sum over the pixels p of the block's tiles of dy[p, co] x[p + tap, ci]
template <Front front>
__device__ inline void weight_gradient(
    const Chunk* first, const float* factors, const Chunk* dy, float* parts, int images, int tiles) {
  Chunk* slope = shared + PLANE * EIGHTS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, square = blockIdx.y * HERE + warp % HERE;
  const int share = warp / HERE, co = square / (C / 16), ci = square % (C / 16);
  float d[9][2][4] = {};
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile = tile_of(index);
    __syncthreads();
    constexpr int EACH = PIXELS * EIGHTS / 256;
    Chunk value[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
      value[i] = is_there(tile, (i * 256 + threadIdx.x) / EIGHTS, images)
                     ? dy[begin_of(tile) * EIGHTS + i * 256 + threadIdx.x] : ZERO;
    read_tile<front, 256>(tile, images, first, nullptr, factors, nullptr);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      slope[threadIdx.x % EIGHTS * SLOPE + (i * 256 + threadIdx.x) / EIGHTS] = value[i];
    __syncthreads();
    for (int sixteen = share; sixteen < PIXELS / 16; sixteen += SHARES) {
      u32 a[4], b[4];
      // transposed: matrices are (pixels 0-7, first eight outputs), (0-7, second), (8-15, first), (8-15, second)
      const int p = sixteen * 16 + lane % 8 + lane / 16 * 8;
      load_transposed(a, slope + (2 * co + lane / 8 % 2) * SLOPE + p);
      // (pixels 0-7, first eight inputs), (8-15, first), (0-7, second), (8-15, second)
      const Chunk* corner = shared + (2 * ci + lane / 16) * PLANE + bordered(sixteen * 16 + lane % 16);
#pragma unroll
      for (int tap = 0; tap < 9; tap++) {
        load_transposed(b, corner + tap / 3 * (W + 2) + tap % 3);
        multiply(d[tap][0], a, b[0], b[1]);
        multiply(d[tap][1], a, b[2], b[3]);
      }
    }
  }
  float* sum = (float*)shared;  // warps that share a square add up, half of them at a time
  for (int half = SHARES / 2; half > 0; half /= 2) {
    __syncthreads();
    float* mine = sum + ((share % half) * HERE + warp % HERE) * SQUARE;
    if (share >= half && share < 2 * half)
#pragma unroll
      for (int i = 0; i < 72; i++) mine[i * 32 + lane] = d[i / 8][i / 4 % 2][i % 4];
    __syncthreads();
    if (share < half)
#pragma unroll
      for (int i = 0; i < 72; i++) d[i / 8][i / 4 % 2][i % 4] += mine[i * 32 + lane];
  }
  if (share > 0) return;
#pragma unroll
  for (int tap = 0; tap < 9; tap++)
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = co * 16 + lane / 4 + 8 * h, column = ci * 16 + t * 8 + lane % 4 * 2;
        float* to = parts + blockIdx.x * SIZE + (row * 9 + tap) * C + column;
        to[0] = d[tap][t][2 * h];
        to[1] = d[tap][t][2 * h + 1];
      }
}

#define WEIGHT_GRADIENT(name, front)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) name(                                                  \
      const Chunk* first, const float* factors, const Chunk* dy, float* parts, int images, int tiles) {    \
    weight_gradient<front>(first, factors, dy, parts, images, tiles);                                      \
  }

WEIGHT_GRADIENT(weight_first, PLAIN)
WEIGHT_GRADIENT(weight_second, NORM_RELU)

// out[layer, i] = sum over parts of parts[layer, part, i]
extern "C" __global__ void __launch_bounds__(256) sum_parts(const float4* parts, float4* out, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= SIZE / 4) return;
  const float4* from = parts + (long long)blockIdx.y * count * (SIZE / 4) + i;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int part = 0; part < count; part++) {
    const float4 value = from[(long long)part * (SIZE / 4)];
    total.x += value.x;
    total.y += value.y;
    total.z += value.z;
    total.w += value.w;
  }
  out[blockIdx.y * (SIZE / 4) + i] = total;
}

// Weights (co, tap, ci) of each layer in the order in which lanes read them, for the convolution and for its gradient
// with taps turned round and inputs and outputs swapped.
extern "C" __global__ void __launch_bounds__(256) prepare(const float* const* weights, u32* forward, u32* backward) {
  const int i = blockIdx.x * 256 + threadIdx.x;  // (tap, k, pair of eights, lane, four words)
  if (i >= SIZE / 2) return;
  const float* w = weights[blockIdx.y];
  const int word = i % 4, lane = i / 4 % 32, pair = i / 128 % (C / 16), k = i / 128 / (C / 16) % KS;
  const int tap = i / 128 / (C / 16) / KS;
  const int in = k * 16 + lane % 4 * 2 + word % 2 * 8, out = (pair * 2 + word / 2) * 8 + lane / 4;
  forward[blockIdx.y * (SIZE / 2) + i] = pack(w[(out * 9 + tap) * C + in], w[(out * 9 + tap) * C + in + 1]);
  backward[blockIdx.y * (SIZE / 2) + i] =
      pack(w[(in * 9 + 8 - tap) * C + out], w[((in + 1) * 9 + 8 - tap) * C + out]);
}
