// values weight^T + bias of bfloat16 numbers, summed in float32, each sum rounded once. Follows lanes.h.
//
// A number is the sum of LANES partial sums, lane by lane along the inner dimension, folded in halves at the end: its
// bits depend on its own row and its own output alone, not on how many rows or threads there are.

#ifdef __AVX512F__
constexpr int ROWS = 6, OUTPUTS = 4;  // 24 sums, 4 weights and a value: 29 of 32 registers
#else
constexpr int ROWS = 2, OUTPUTS = 4;  // 13 of 16
#endif

constexpr long TILE = 16;         // outputs whose widened weights stay in a core's first caches
constexpr long PANEL = 4 * ROWS;  // rows that do

static void widen(const uint16_t* from, float* to, long n, long padded) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        Floats some = widened(from + i);
        memcpy(to + i, &some, sizeof some);
    }
    for (; i < padded; ++i) {
        uint32_t word = i < n ? uint32_t(from[i]) << 16 : 0;
        memcpy(to + i, &word, sizeof word);
    }
}

static uint16_t rounded(float value) {  // to nearest, ties to even, as torch rounds
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

template <int rows, int outputs>
static void block(const float* values, const float* weight, long inner, float (*out)[OUTPUTS]) {
    Floats sums[rows][outputs] = {};
    for (long i = 0; i < inner; i += LANES) {
        Floats of_weight[outputs];
#pragma GCC unroll 8
        for (int o = 0; o < outputs; ++o) memcpy(&of_weight[o], weight + o * inner + i, sizeof(Floats));
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            Floats value;
            memcpy(&value, values + r * inner + i, sizeof value);
#pragma GCC unroll 8
            for (int o = 0; o < outputs; ++o) sums[r][o] += value * of_weight[o];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; ++o) out[r][o] = folded(sums[r][o]);
}

template <int rows, int outputs>
static void some_rows(int num, const float* values, const float* weight, long inner, float (*out)[OUTPUTS]) {
    if constexpr (rows > 1)
        if (num < rows) return some_rows<rows - 1, outputs>(num, values, weight, inner, out);
    block<rows, outputs>(values, weight, inner, out);
}

template <int outputs>
static void all_rows(const float* values, const float* weight, const float* bias, long rows, long inner, uint16_t* out,
                     long width) {
    float sums[ROWS][OUTPUTS];
    for (long r = 0; r < rows; r += ROWS) {
        int num = int(rows - r < ROWS ? rows - r : ROWS);
        some_rows<ROWS, outputs>(num, values + r * inner, weight, inner, sums);
        for (int i = 0; i < num; ++i)
            for (int o = 0; o < outputs; ++o)
                out[(r + i) * width + o] = rounded(bias ? sums[i][o] + bias[o] : sums[i][o]);
    }
}

// values [rows, inner], weight [width, inner], bias [width] or null; out [rows, width]. 0, or 1 without memory.
extern "C" int cacheprobe_product(const uint16_t* values, const uint16_t* weight, const uint16_t* bias, uint16_t* out,
                                  long rows, long inner, long width, int threads) {
    long padded = (inner + LANES - 1) / LANES * LANES;
    float* wide = static_cast<float*>(aligned_alloc(64, (rows * padded * 4 + 63) / 64 * 64));
    float* parts = static_cast<float*>(aligned_alloc(64, threads * (TILE * padded * 4 + 64)));
    if (!wide || !parts) {
        free(wide);
        free(parts);
        return 1;
    }
    for (long r = 0; r < rows; ++r) widen(values + r * inner, wide + r * padded, inner, padded);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; ++t) {  // a thread's outputs stand together: its weights are read in order
        float* part = parts + t * (TILE * padded + 16);
        float of_bias[TILE];
        long tiles = (width + TILE - 1) / TILE;
        for (long tile = tiles * t / threads; tile < tiles * (t + 1) / threads; ++tile) {
            long start = tile * TILE, here = width - start < TILE ? width - start : TILE;
            for (long o = 0; o < here; ++o) widen(weight + (start + o) * inner, part + o * padded, inner, padded);
            if (bias) widen(bias + start, of_bias, here, here);
            for (long r = 0; r < rows; r += PANEL) {
                long num = rows - r < PANEL ? rows - r : PANEL;
                uint16_t* to = out + r * width + start;
                const float* from = wide + r * padded;
                long o = 0;
                for (; o + OUTPUTS <= here; o += OUTPUTS)
                    all_rows<OUTPUTS>(from, part + o * padded, bias ? of_bias + o : nullptr, num, padded, to + o, width);
                for (; o < here; ++o)
                    all_rows<1>(from, part + o * padded, bias ? of_bias + o : nullptr, num, padded, to + o, width);
            }
        }
    }
    free(wide);
    free(parts);
    return 0;
}
