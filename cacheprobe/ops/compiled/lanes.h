// What the files of this folder share: numbers side by side in one register of the processor.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

static inline Floats widened(const uint16_t* from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    Words words = __builtin_convertvector(halves, Words) << 16;
    Floats floats;
    memcpy(&floats, &words, sizeof floats);
    return floats;
}

static inline float folded(Floats sums) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
}

static inline void widen(const uint16_t* from, float* to, long n, long padded) {
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

static inline Halves narrowed(Floats values) {  // to nearest, ties to even, as torch rounds
    Words words;
    memcpy(&words, &values, sizeof words);
    Words no_number = (Words)((words & 0x7fffffff) > 0x7f800000);
    Words near = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    return __builtin_convertvector((near & ~no_number) | (0x7fc0 & no_number), Halves);
}

// Lanes i of a, then of b: of every run of 2 `size` lanes the first half (or the second, for `second`).
constexpr int taken(int i, int size, bool second) { return i / size * 2 * size + i % size + (second ? size : 0); }

template <int size, int... i>
static inline Floats paired(Floats a, Floats b, std::integer_sequence<int, i...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, taken(i, size, false)...) + __builtin_shufflevector(a, b, taken(i, size, true)...);
#else
    return __builtin_shuffle(a, b, Whole{taken(i, size, false)...}) + __builtin_shuffle(a, b, Whole{taken(i, size, true)...});
#endif
}

// Lane i: the lanes of sums[mirrored(i)], in the order of `folded`.
template <int size = LANES / 2>
static inline Floats folded_each(Floats* sums) {
#pragma GCC unroll 8
    for (int i = 0; i < size; ++i)
        sums[i] = paired<size>(sums[i], sums[i + size], std::make_integer_sequence<int, LANES>());
    if constexpr (size > 1) return folded_each<size / 2>(sums);
    return sums[0];
}

constexpr int mirrored(int i) {  // its bits from last to first
    int made = 0;
    for (int bit = 1; bit < LANES; bit *= 2) made = made * 2 + (i / bit) % 2;
    return made;
}
