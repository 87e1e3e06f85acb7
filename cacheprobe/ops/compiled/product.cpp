// values weight^T + bias of bfloat16 numbers, summed in float32, each sum rounded once. Follows lanes.h.
//
// A number is the sum of LANES partial sums, lane by lane along the inner dimension, folded in halves at the end: its
// bits depend on its own row and its own output alone, not on how many rows or threads there are.

constexpr int OUTPUTS = 4, ROWS = LANES / OUTPUTS;  // as many sums at once as can be folded at once
constexpr long PANEL = 1 << 18;                     // widened numbers of rows that stay in a core's second cache

static inline Floats lanes(const uint16_t* from) { return widened(from); }
static inline Floats lanes(const float* from) {
    Floats floats;
    memcpy(&floats, from, sizeof floats);
    return floats;
}

// Sums of `rows` rows with OUTPUTS outputs, row by row side by side; the rest is zero.
template <int rows, class Number>
static inline Floats block(const float* values, const Number* weight, long inner) {
    Floats sums[LANES] = {};  // where `folded_each` wants them
    for (long i = 0; i < inner; i += LANES) {
        Floats of_weight[OUTPUTS];
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; ++o) of_weight[o] = lanes(weight + o * inner + i);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            Floats value = lanes(values + r * inner + i);
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; ++o) sums[mirrored(r * OUTPUTS + o)] += value * of_weight[o];
        }
    }
    return folded_each(sums);
}

template <int rows, class Number>
static inline Floats some_rows(long num, const float* values, const Number* weight, long inner) {
    if constexpr (rows > 1)
        if (num < rows) return some_rows<rows - 1>(num, values, weight, inner);
    return block<rows>(values, weight, inner);
}

// Rows first..last-1 of OUTPUTS outputs from `start` on. part: room for their widened weights.
static void fill(const float* wide, const uint16_t* weight, const uint16_t* bias, float* part, uint16_t* out, long first,
                 long last, long start, long inner, long padded, long width) {
    const uint16_t* own = weight + start * inner;
    long here = width - start < OUTPUTS ? width - start : OUTPUTS;
    bool is_read_once = last - first <= ROWS && here == OUTPUTS && inner == padded;
    for (long o = 0; o < OUTPUTS && !is_read_once; ++o)
        widen(own + o * inner, part + o * padded, o < here ? inner : 0, padded);
    float of_bias[LANES] = {};
    for (int i = 0; bias && i < LANES; ++i)
        if (i % OUTPUTS < here) widen(bias + start + i % OUTPUTS, of_bias + i, 1, 1);
    Floats added = lanes(of_bias);
    for (long r = first; r < last; r += ROWS) {
        const float* from = wide + r * padded;
        Floats sums = is_read_once ? some_rows<ROWS>(last - r, from, own, padded)
                                   : some_rows<ROWS>(last - r, from, part, padded);
        Halves made = narrowed(sums + added);
        uint16_t numbers[LANES];
        memcpy(numbers, &made, sizeof made);
        for (long i = 0; i < ROWS && r + i < last; ++i) {
            uint16_t* to = out + (r + i) * width + start;
            if (here == OUTPUTS)
                memcpy(to, numbers + i * OUTPUTS, 2 * OUTPUTS);
            else
                memcpy(to, numbers + i * OUTPUTS, 2 * here);
        }
    }
}

// values [rows, inner], weight [width, inner], bias [width] or null; out [rows, width]. 0, or 1 without memory.
extern "C" int cacheprobe_product(const uint16_t* values, const uint16_t* weight, const uint16_t* bias, uint16_t* out,
                                  long rows, long inner, long width, int threads) {
    long padded = (inner + LANES - 1) / LANES * LANES;
    float* wide = static_cast<float*>(aligned_alloc(64, (rows * padded * 4 + 63) / 64 * 64));
    float* parts = static_cast<float*>(aligned_alloc(64, threads * (OUTPUTS * padded * 4 + 64)));
    if (!wide || !parts) {
        free(wide);
        free(parts);
        return 1;
    }
    long panel = PANEL / padded / ROWS * ROWS > ROWS ? PANEL / padded / ROWS * ROWS : ROWS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; ++r) widen(values + r * inner, wide + r * padded, inner, padded);
#pragma omp for schedule(static)
        for (int t = 0; t < threads; ++t) {  // a thread's outputs stand together: its weights are read in order
            long tiles = (width + OUTPUTS - 1) / OUTPUTS;
            for (long first = 0; first < rows; first += panel)
                for (long tile = tiles * t / threads; tile < tiles * (t + 1) / threads; ++tile)
                    fill(wide, weight, bias, parts + t * (OUTPUTS * padded + 16), out, first,
                         first + panel < rows ? first + panel : rows, tile * OUTPUTS, inner, padded, width);
        }
    }
    free(wide);
    free(parts);
    return 0;
}
