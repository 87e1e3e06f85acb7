// What bfloat16 logits say, row by row: largest value of every block, sums, and what comes before a target. Follows
// lanes.h. A row is read by itself, so its bits depend on nothing else.

constexpr long BLOCK = 128;
constexpr long FOLDED = 32;  // blocks whose sums stay in float32 before they join the row's, in float64

// Of numbers from LOWEST to 0, to two units in the last place (Cephes' expf); what is smaller adds nothing to a sum.
constexpr float LOWEST = -87.0f;
static inline Floats exponential(Floats x) {
    Floats shifted = x * 1.44269504088896341f + 12582912.0f;  // to a whole number in the low bits
    Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    Whole power = (__builtin_convertvector(n, Whole) + 127) << 23;
    Floats scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

static inline const uint16_t* block_of(const uint16_t* row, long start, long width, uint16_t* padded) {
    if (start + BLOCK <= width) return row + start;
    for (long i = 0; i < BLOCK; ++i) padded[i] = start + i < width ? row[start + i] : 0xff80;  // -inf
    return padded;
}

static long before_in(const uint16_t* block, long start, float value, long target) {
    if (target >= start && target < start + BLOCK) {
        long count = 0;
        for (long i = 0; i < BLOCK; ++i) {
            uint32_t word = uint32_t(block[i]) << 16;
            float other;
            memcpy(&other, &word, sizeof other);
            count += other > value || (other == value && start + i < target);
        }
        return count;
    }
    Whole counts = {};
    for (long i = 0; i < BLOCK; i += LANES)
        counts -= start < target ? (Whole)(widened(block + i) >= value) : (Whole)(widened(block + i) > value);
    long count = 0;
    for (int i = 0; i < LANES; ++i) count += counts[i];
    return count;
}

// logits [rows, width], targets [rows] and their logits, -1 for none. Out: tops [rows, blocks], best, total and weighted
// [rows] (sums of exp(x - best) and of exp(x - best) (x - best)), before [rows].
extern "C" void cacheprobe_readout(const uint16_t* logits, const int64_t* targets, const float* target_values,
                                   float* tops, float* best, float* total, float* weighted, int64_t* before, long rows,
                                   long width, int threads) {
    long blocks = (width + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; ++r) {
        const uint16_t* row = logits + r * width;
        uint16_t padded[BLOCK];
        float largest = -INFINITY;
        bool has_nan = false;
        long count = 0;
        for (long b = 0; b < blocks; ++b) {
            const uint16_t* block = block_of(row, b * BLOCK, width, padded);
            Floats top = widened(block);
            Whole nans = (Whole)(top != top);
            for (long i = LANES; i < BLOCK; i += LANES) {
                Floats some = widened(block + i);
                nans |= (Whole)(some != some);
                top = some > top ? some : top;
            }
            float one = top[0];
            for (int i = 0; i < LANES; ++i) {
                one = top[i] > one ? top[i] : one;
                has_nan |= nans[i] != 0;
            }
            tops[r * blocks + b] = one;
            largest = one > largest ? one : largest;
            if (targets[r] >= 0) count += before_in(block, b * BLOCK, target_values[r], targets[r]);
        }
        before[r] = targets[r] >= 0 ? count : -1;
        best[r] = largest;
        double sum = 0, mean = 0;
        if (has_nan || std::isinf(largest)) {
            sum = mean = NAN;
        } else {
            for (long b = 0; b < blocks; b += FOLDED) {
                Floats sums = {}, means = {};
                for (long c = b; c < b + FOLDED && c < blocks; ++c) {
                    const uint16_t* block = block_of(row, c * BLOCK, width, padded);
                    for (long i = 0; i < BLOCK; i += LANES) {
                        Floats x = widened(block + i) - largest;
                        x = x > LOWEST ? x : LOWEST + (Floats){};
                        Floats weight = exponential(x);
                        sums += weight;
                        means += weight * x;
                    }
                }
                sum += folded(sums);
                mean += folded(means);
            }
        }
        total[r] = float(sum);
        weighted[r] = float(mean);
    }
}
