// How maps of C channels, H x W, in channels-last bfloat16 are divided into tiles, and read into shared memory with what
// stands in front of a convolution already done.
//
// Defined before this source: C (16, 32, 64), H and W, and what stands in warp.cuh.

struct alignas(16) Chunk { u32 x[4]; };  // eight channels
#define ZERO Chunk{{0, 0, 0, 0}}

extern __shared__ Chunk shared[];

constexpr int PARTS = C == 64 ? 2 : 1;                    // the output channels are split between so many blocks
constexpr int NC = C / PARTS, NT = NC / 8, KS = C / 16;   // channels of a block, in eights; input channels in sixteens
constexpr int WARPS = C == 64 ? 4 : 8, THREADS = 32 * WARPS;
constexpr int MF = C == 16 ? 4 : 2;                       // sixteens of pixels of a warp
constexpr int PIXELS = WARPS * MF * 16;                   // of a tile
constexpr int ROWS = PIXELS / W < H ? PIXELS / W : H;     // of an image in a tile
constexpr int IMAGES = PIXELS / (ROWS * W);               // in a tile
constexpr int PER_IMAGE = H / ROWS;                       // tiles
constexpr int BORDERED = IMAGES * (ROWS + 2) * (W + 2);   // pixels of a tile with its border
constexpr int EIGHTS = C / 8;
static_assert(IMAGES * ROWS * W == PIXELS && ROWS * PER_IMAGE == H, "tiles must fit the maps");

enum Front { PLAIN, NORM_RELU, NORM_ADD_RELU, NORM_GRADIENT };

// Shared memory holds a plane of pixels for every eight channels. Neighbours are side by side, and the planes begin
// where threads that write a pixel's eights at once meet no bank twice.
template <int pixels, int eights>
__device__ constexpr int plane() {
  return pixels + (8 / eights + 8 - pixels % 8) % 8;
}
constexpr int PLANE = plane<BORDERED, EIGHTS>(), OUT = plane<PIXELS, NT>(), SLOPE = plane<PIXELS, EIGHTS>();

struct Tile { int image, row; };

__device__ inline Tile tile_of(int index) {
  Tile tile;
  tile.image = index / PER_IMAGE * IMAGES;
  tile.row = index % PER_IMAGE * ROWS;
  return tile;
}

// The first pixel of a tile among all; the others follow it.
__device__ inline int begin_of(Tile tile) { return (tile.image * H + tile.row) * W; }

__device__ inline bool is_there(Tile tile, int p, int images) {  // a last tile may have fewer images
  return IMAGES == 1 || tile.image + p / (ROWS * W) < images;
}

__device__ inline int bordered(int p) {  // in the tile with its border: the pixel above and left of pixel p
  return (p / (ROWS * W) * (ROWS + 2) + p / W % ROWS) * (W + 2) + p % W;
}

template <int rows>
__device__ inline void read_factors(float (&f)[3][8], const float* from) {
#pragma unroll
  for (int i = 0; i < rows; i++)
#pragma unroll
    for (int c = 0; c < 8; c++) f[i][c] = from[i * C + c];
}

template <Front front>
__device__ inline Chunk in_front(Chunk first, Chunk second, bool has_second, const float (&f)[3][8]) {
  Chunk out;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float v[2] = {low(first.x[i]), high(first.x[i])};
    const float w[2] = {low(second.x[i]), high(second.x[i])};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int c = 2 * i + j;
      if (front == NORM_GRADIENT) {
        v[j] = f[0][c] * v[j] + f[1][c] * w[j] + f[2][c];
      } else {
        v[j] = v[j] * f[0][c] + f[1][c];
        if (front == NORM_ADD_RELU && has_second) v[j] += w[j];
        v[j] = v[j] < 0.0f ? 0.0f : v[j];  // keeps NaN, as torch does: a divergence must show in the loss
      }
    }
    out.x[i] = pack(v[0], v[1]);
  }
  return out;
}

// A tile into shared memory with a border: zeros around an image, its other rows above and below. What was computed for
// the tile's own pixels goes to `side`.
template <Front front, int threads>
__device__ inline void read_tile(
    Tile tile, int images, const Chunk* first, const Chunk* second, const float* factors, Chunk* side) {
  constexpr int STEP = threads / EIGHTS, EACH = PIXELS / STEP, AT_ONCE = EACH < 4 ? EACH : 4;
  const int eight = threadIdx.x % EIGHTS, pixel = threadIdx.x / EIGHTS;
  const bool two = front == NORM_GRADIENT || (front == NORM_ADD_RELU && second != nullptr);
  float f[3][8];
  read_factors<front == PLAIN ? 0 : front == NORM_GRADIENT ? 3 : 2>(f, factors + eight * 8);
  Chunk* to = shared + eight * PLANE;
  const int from = begin_of(tile) * EIGHTS + threadIdx.x;
#pragma unroll
  for (int begin = 0; begin < EACH; begin += AT_ONCE) {
    Chunk value[AT_ONCE], other[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = from + (begin + i) * threads;
      const bool there = is_there(tile, pixel + (begin + i) * STEP, images);
      value[i] = there ? first[at] : ZERO;
      other[i] = there && two ? second[at] : ZERO;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int p = pixel + (begin + i) * STEP;
      if (front != PLAIN && is_there(tile, p, images)) {
        value[i] = in_front<front>(value[i], other[i], two, f);
        if (side != nullptr) side[from + (begin + i) * threads] = value[i];
      }
      to[bordered(p) + W + 3] = value[i];
    }
  }
  for (int i = pixel; i < IMAGES * (ROWS + 2); i += STEP) to[i * (W + 2)] = to[i * (W + 2) + W + 1] = ZERO;
  for (int i = pixel; i < IMAGES * 2 * W; i += STEP) {
    const int image = i / (2 * W), below = i / W % 2, row = below ? tile.row + ROWS : tile.row - 1;
    Chunk value = ZERO;
    if (PER_IMAGE > 1 && row >= 0 && row < H) {
      const int at = ((tile.image * H + row) * W + i % W) * EIGHTS + eight;
      value = first[at];
      if (front != PLAIN) value = in_front<front>(value, two ? second[at] : ZERO, two, f);
    }
    to[(image * (ROWS + 2) + below * (ROWS + 1)) * (W + 2) + i % W + 1] = value;
  }
}
