// Pieces of the rows of a grouped GEMM, dequantized to bf16, for inclusion.
//
// Macros: FMT (FormatCode), SCALE_BLOCK, PACKED (ScaleLayout of the scales, else swizzled; those of FP8_BLOCK are
// K_MAJOR), SCALES_IN_RECORD (scales lie with their rows, in neither layout).

#ifndef MOE_RUNTIME_TOKEN_PIECE
#define MOE_RUNTIME_TOKEN_PIECE

#include "numbers.cuh"

constexpr bool GROUP_SCALES = FMT != BF16 && FMT != FP8_BLOCK && !SCALES_IN_RECORD;
constexpr int NUMBER_BITS = FMT == BF16 ? 16 : FMT == NVFP4 ? 4 : 8;

static_assert(FMT == BF16 || FMT == FP8_BLOCK || FMT == MXFP8 || FMT == NVFP4,
              "FMT: no format that is dequantized to bf16");
static_assert(!PACKED || !SCALES_IN_RECORD, "PACKED: scales in records have a layout of their own");

// 16 columns of a row as they are stored; zeros if nothing was loaded.
struct Piece {
  u32 words[FMT == BF16 ? 8 : FMT == NVFP4 ? 2 : 4] = {};
  u32 scale = 0;  // as it is stored: the bits of an fp32 number in FP8_BLOCK, else a byte

  __device__ __forceinline__ void load(const u8* at) {
    if (FMT == NVFP4) {
      const uint2 quants = *reinterpret_cast<const uint2*>(at);
      words[0] = quants.x, words[1] = quants.y;
    } else {
#pragma unroll
      for (int i = 0; i < (FMT == BF16 ? 2 : 1); ++i) {
        const uint4 part = reinterpret_cast<const uint4*>(at)[i];
        words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
      }
    }
  }

  // The scale of column block `v`, given where those of the row lie.
  __device__ __forceinline__ void load_scale(const u8* at, int of_four, u32 v) {
    if (FMT == FP8_BLOCK) scale = reinterpret_cast<const u32*>(at)[v];
    else if (FMT != BF16) scale = at[static_cast<long long>(v / 4) * of_four + v % 4];
  }

  __device__ __forceinline__ void dequantize(u32 (&pairs)[8]) const {
    float low = 0.0f, high;
    if (FMT == NVFP4) e4m3_pair(scale, low, high);
    const u32 factor = FMT == NVFP4 ? e4m3_factor(low) : e8m0_pair(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (FMT == BF16) {
        pairs[i] = words[i];
      } else if (FMT == NVFP4) {
        pairs[i] = e2m1_pair(__byte_perm(words[i / 4], 0, 0x4440 + (i & 3)), factor);
      } else {
        // Only with such a move does the compiler use halves of a register as operands of conversions.
        u16 halves[2];
        asm("mov.b32 {%0, %1}, %2;" : "=h"(halves[0]), "=h"(halves[1]) : "r"(words[i / 2]));
        if (FMT == FP8_BLOCK) {
          // Rounded twice, to fp32 and to bf16, as the other engines do.
          e4m3_pair(halves[i & 1], low, high);
          pairs[i] = pack_bf16(__fmul_rn(low, __uint_as_float(scale)), __fmul_rn(high, __uint_as_float(scale)));
        } else {
          pairs[i] = e4m3_decoded(halves[i & 1], factor);
        }
      }
    }
  }
};

// Where a row lies, in bytes: its numbers, and its scales (`Piece::load_scale`): those of FP8_BLOCK lie side by side,
// that of column block v of other formats is v / 4 * of_four + v % 4 behind.
struct RowPlace {
  long long numbers, scales = 0;
  int of_four = 4;
};

// The row is `source` in memory and `local` in its group, which starts at position `start`. `scale_ld` is the leading
// dimension of PACKED scales, or the bytes from one row's scales in a record to the next.
__device__ __forceinline__ RowPlace place_of_row(long long source, int start, int local, int group_scale_offset,
                                                 int scale_ld, long long row_bytes, int columns) {
  RowPlace place;
  place.numbers = source * row_bytes;
  if (SCALES_IN_RECORD) {
    place.scales = source * scale_ld;
  } else if (GROUP_SCALES) {
    const long long first = group_scale_offset;
    const long long scale_row = PACKED ? first + local : (start / 128 + first) * 128 + local;
    place.scales = PACKED ? scale_row * 4 : swizzled_offset(scale_row, 0, ceil_div(columns, SCALE_BLOCK));
    place.of_four = PACKED ? scale_ld * 4 : 512;
  } else if (FMT == FP8_BLOCK) {
    place.scales = (static_cast<long long>(start) + local) * ceil_div(columns, SCALE_BLOCK) * 4;
  }
  return place;
}

#endif
