// What the files of this folder share: numbers side by side in one register of the processor.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

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
