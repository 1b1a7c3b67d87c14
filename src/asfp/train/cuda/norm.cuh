// Batch norm: the sums over all pixels, and the factors that follow from them.
//
// `stat` has seven rows of C numbers: mean and 1/deviation; scale and shift of the normalisation, y -> scale y + shift;
// and the factors of its gradient, dy = a g + b y + d, with g the gradient behind it.

struct Norm {  // of one layer
  const float *gamma, *beta;
  float *mean, *var;  // running
  float* stat;
  float* slopes;      // the gradients of gamma and beta
};

// From the two sums of a channel to the rows of `stat`; `per` is 1 / the number of pixels.
template <bool backward>
__device__ inline void conclude(Norm n, int c, double first, double second, double per, float momentum, float eps) {
  float* s = n.stat + c;
  if (!backward) {
    const double mean = first * per, spread = second * per - mean * mean;
    const float var = spread < 0.0 ? 0.0f : (float)spread, inverse = 1.0f / sqrtf(var + eps), scale = n.gamma[c] * inverse;
    s[0] = (float)mean;
    s[C] = inverse;
    s[2 * C] = scale;
    s[3 * C] = n.beta[c] - (float)mean * scale;
    n.mean[c] += momentum * ((float)mean - n.mean[c]);
    n.var[c] += momentum * (var / (float)(1.0 - per) - n.var[c]);
  } else {
    const float mean = s[0], inverse = s[C], a = s[2 * C];
    const float slope = inverse * (float)(second - (double)mean * first);  // of gamma
    n.slopes[c] = slope;
    n.slopes[C + c] = (float)first;
    s[4 * C] = a;
    s[5 * C] = -a * inverse * slope * (float)per;
    s[6 * C] = a * (inverse * mean * slope - (float)first) * (float)per;
  }
}

// Adds up two sums of eight channels a thread (channels eight * 8 ... of `channels`), over all blocks of the grid's x.
// sums: room for 2 * channels numbers of each block, or null where nothing is to be learned; ticket: 0, and 0 again
// afterwards.
template <bool backward, int channels, int threads>
__device__ inline void add_up(
    const float (&s)[2][8], float* sums, u32* ticket, int from, Norm norm, double per, float momentum, float eps) {
  constexpr int eights = channels / 8, values = 2 * channels;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, eight = threadIdx.x % eights;
  if (sums == nullptr) return;
  float* room = (float*)shared;
  __syncthreads();  // it is free
  float t[16];  // lanes that have the same eight channels: each keeps half of the sums and gets the other lane's half
#pragma unroll
  for (int i = 0; i < 16; i++) t[i] = s[i / 8][i % 8];
  int mine = 0;
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const int mask = 16 >> step, count = 8 >> step;
    if (mask >= eights) {
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < count) {
          const float given = upper ? t[i] : t[i + count], kept = upper ? t[i + count] : t[i];
          t[i] = kept + from_lane_xor(given, mask);
        }
      mine += upper ? count : 0;
    }
  }
  constexpr int kept = eights / 2;
#pragma unroll
  for (int i = 0; i < kept; i++)
    room[warp * values + (mine + i) / 8 * channels + eight * 8 + (mine + i) % 8] = t[i];
  __syncthreads();
  for (int v = threadIdx.x; v < values; v += threads) {
    float value = 0.0f;
    for (int w = 0; w < threads / 32; w++) value += room[w * values + v];
    sums[blockIdx.x * values + v] = value;
  }
  __syncthreads();
  u32* last = (u32*)room;
  if (threadIdx.x == 0) *last = take(ticket) == gridDim.x - 1;
  __syncthreads();
  const bool is_last = *last;
  __syncthreads();
  if (!is_last) return;
  double* totals = (double*)room;
  constexpr int groups = threads / values;
  for (int v = threadIdx.x; v < values * groups; v += threads) {
    double total = 0.0;
    for (int begin = v / values; begin < gridDim.x; begin += 16 * groups) {
      float part[16];  // all under way at once
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int block = begin + i * groups;
        part[i] = block < gridDim.x ? fresh(sums + block * values + v % values) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 16; i++) total += part[i];
    }
    totals[v] = total;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < channels; c += threads) {
    double first = 0.0, second = 0.0;
    for (int g = 0; g < groups; g++) {
      first += totals[g * values + c];
      second += totals[g * values + channels + c];
    }
    conclude<backward>(norm, from + c, first, second, per, momentum, eps);
  }
  if (threadIdx.x == 0) *ticket = 0;
}
