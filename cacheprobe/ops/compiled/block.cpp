// What a block of a llama-like decoder computes beside its products and its attention, of bfloat16 numbers. Follows
// lanes.h. A number's bits depend on its own row alone.

constexpr long FEW = 1 << 15;  // numbers for which a second thread costs more than it saves

static inline Floats some(const uint16_t* from, long n) {  // the rest is zero
    if (n >= LANES) return widened(from);
    uint16_t padded[LANES] = {};
    for (long i = 0; i < n; ++i) padded[i] = from[i];
    return widened(padded);
}

static inline Floats kept(Floats values) {  // what is left of them in bfloat16
    Words words = __builtin_convertvector(narrowed(values), Words) << 16;
    memcpy(&values, &words, sizeof values);
    return values;
}

static inline void put(uint16_t* to, Floats values, long n) {
    Halves halves = narrowed(values);
    if (n >= LANES)
        memcpy(to, &halves, sizeof halves);
    else
        for (long i = 0; i < n; ++i) to[i] = halves[i];
}

// values and out [rows, width], weight [width].
extern "C" void cacheprobe_rms_norm(const uint16_t* values, const uint16_t* weight, uint16_t* out, long rows, long width,
                                    float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > FEW)
    for (long r = 0; r < rows; ++r) {
        const uint16_t* row = values + r * width;
        Floats squares = {};
        for (long i = 0; i < width; i += LANES) {
            Floats value = some(row + i, width - i);
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(folded(squares) / width + eps);
        for (long i = 0; i < width; i += LANES)
            put(out + r * width + i, some(weight + i, width - i) * kept(some(row + i, width - i) * scale), width - i);
    }
}

// Rotates values [rows, heads, width] in place by cos and sin [rows, width], whose first half is negated.
extern "C" void cacheprobe_turn(uint16_t* values, const uint16_t* cos, const uint16_t* sin, long rows, long heads,
                                long width, int threads) {
    long half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * width > FEW)
    for (long r = 0; r < rows; ++r)
        for (long h = 0; h < heads; ++h)
            for (long i = 0; i < half; i += LANES) {
                uint16_t* first = values + (r * heads + h) * width + i;
                const uint16_t *of_cos = cos + r * width + i, *of_sin = sin + r * width + i;
                long n = half - i;
                Floats x = some(first, n), y = some(first + half, n);
                put(first, kept(x * some(of_cos, n)) + kept(y * some(of_sin, n)), n);
                put(first + half, kept(y * some(of_cos + half, n)) + kept(x * some(of_sin + half, n)), n);
            }
}
