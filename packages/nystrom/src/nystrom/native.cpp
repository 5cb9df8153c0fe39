// Loops over the tokens of one head at a time, in the cache of one core. `native` compiles this file, once for
// REAL = float and once for double, and says what each function computes. Rows of numbers are padded with zeros to whole
// pairs of vectors, so that a product has no rest.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
constexpr int BYTES = 64, ROWS = 8;
#else
constexpr int BYTES = 32, ROWS = 4;
#endif
constexpr int64_t N = BYTES / sizeof(REAL), PAIR = 2 * N, STRIP = 8, GROUP = 16;
constexpr REAL NONE = -std::numeric_limits<REAL>::infinity();
typedef std::conditional_t<sizeof(REAL) == 4, int32_t, int64_t> Int;
typedef REAL Vec __attribute__((vector_size(BYTES)));
typedef Int Ints __attribute__((vector_size(BYTES)));
typedef REAL Anywhere __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef std::vector<REAL> Numbers;

// A tensor (batch, heads, tokens, width) whose last axis is dense; a row is a head of a sequence.
struct Rows {
    REAL* at;
    int64_t batch, head, token, heads;
    REAL* of(int64_t row) const { return at + row / heads * batch + row % heads * head; }
};

static int64_t up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }
static Vec load(const REAL* x) { return *(const Anywhere*)x; }
static void store(REAL* x, Vec y) { *(Anywhere*)x = y; }
static void add(REAL* to, const REAL* x, int64_t size, REAL factor = 1) {
    for (int64_t i = 0; i < size; i++) to[i] += factor * x[i];
}

template <class Combine>
static inline REAL reduce(Vec x, Combine combine) {
    REAL parts[N];
    store(parts, x);
    for (int width = N / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] = combine(parts[i], parts[i + width]);
    return parts[0];
}

// exp(x) of x <= 0: 2^n times the series of the rest, at most ln(2) / 2 in size; 0 below the normal numbers.
static inline Vec exp_of(Vec x) {
    constexpr bool single = sizeof(REAL) == 4;
    constexpr REAL lowest = single ? -87.3 : -708, magic = single ? 12582912. : 6755399441055744.;
    constexpr REAL high = single ? 0.693359375 : 0.693145751953125, low = 0.6931471805599453094 - high;
    constexpr int terms = single ? 7 : 13, digits = single ? 23 : 52;
    Vec zero = {}, floor = zero + lowest, y = x < floor ? floor : x;
    Vec shifted = y * (REAL)1.4426950408889634 + magic, n = shifted - magic;
    Vec rest = y - n * high - n * low, sum = zero + 1;
    for (int i = terms; i > 0; i--) sum = sum * rest * (REAL)(1. / i) + 1;
    Ints power = (Ints)shifted - (Ints)(zero + magic);
    Vec result = (Vec)((Ints)sum + (power << digits)) + (y - y);  // NaN stays NaN
    return x < floor ? zero : result;
}

// C = A B, or A^T B, or that added to C: rows of C a multiple of STRIP, or of R at a time, columns of PAIR.
template <bool TRANSPOSED = false, bool ADD = false, int R = ROWS>
static void product(const REAL* a, int64_t lda, const REAL* b, int64_t ldb, REAL* c, int64_t ldc, int64_t rows,
                    int64_t depth, int64_t columns) {
    for (int64_t j = 0; j < columns; j += PAIR) {
        for (int64_t i0 = 0; i0 < rows; i0 += R) {
            Vec sum[R][2] = {};
            const REAL* left = a + i0 * (TRANSPOSED ? 1 : lda);
            for (int64_t k = 0; k < depth; k++) {
                Vec first = load(b + k * ldb + j), second = load(b + k * ldb + j + N);
                for (int i = 0; i < R; i++) {
                    REAL factor = TRANSPOSED ? left[k * lda + i] : left[i * lda + k];
                    sum[i][0] += factor * first;
                    sum[i][1] += factor * second;
                }
            }
            for (int i = 0; i < R; i++) {
                REAL* to = c + (i0 + i) * ldc + j;
                store(to, ADD ? load(to) + sum[i][0] : sum[i][0]);
                store(to + N, ADD ? load(to + N) + sum[i][1] : sum[i][1]);
            }
        }
    }
}

// x <- exp(scale x + bias - largest), for one row; returns 1 / sum.
static REAL softmax(REAL* x, const REAL* bias, REAL scale, int64_t size) {
    Vec largest = load(x) * scale + load(bias), sum = {};
    for (int64_t j = 0; j < size; j += N) {
        Vec here = load(x + j) * scale + load(bias + j);
        store(x + j, here);
        largest = here > largest ? here : largest;
    }
    const REAL top = reduce(largest, [](REAL a, REAL b) { return a > b ? a : b; });
    for (int64_t j = 0; j < size; j += N) {
        Vec here = exp_of(load(x + j) - top);
        store(x + j, here);
        sum += here;
    }
    return 1 / reduce(sum, std::plus<REAL>());
}

struct Blocks {
    Rows q, k, v, out, grad, of_q, of_k, of_v;
    const int64_t* heavy;
    const uint8_t* exists;
    const int64_t* cluster;
    int64_t* selected;
    const uint8_t* real;
    const REAL* bias;
    REAL* of_bias;
    int64_t clusters, size, reach, tokens, d, e, heavies, selects, heads, furthest, beside;
    double scale;
};

// A bias of positions for one head: that of each distance of two places, from -furthest on; the weight, in place of one, of
// a key at each place of `beside` blocks on either side of a block, zero in its window, and of a key further left and right;
// and the logarithm of what weights are divided by.
struct Positions {
    int64_t furthest = 0, width = 0;
    const REAL *distance = nullptr, *around = nullptr, *sides = nullptr;
    Positions() {}
    Positions(const Blocks& s, int64_t row) : furthest(s.furthest), width((2 * s.beside + 1) * s.size) {
        distance = s.bias + row % s.heads * size();
        around = distance + 2 * furthest + 1, sides = around + width;
    }
    int64_t size() const { return 2 * furthest + 1 + width + 3; }
    int64_t at(int64_t between) const { return std::min(std::max(between, -furthest), furthest) + furthest; }
};

// The tokens of each cluster, one after the other in slots, and the sums of the values of TOGETHER of them.
struct InClusters {
    static constexpr int64_t TOGETHER = 8;
    const int64_t t, e, m;
    std::vector<int64_t> begin, end, token, slot;
    Numbers sums;
    std::vector<uint8_t> is_out;
    std::vector<int32_t> out;

    InClusters(int64_t t, int64_t e, int64_t m) : t(t), e(e), m(m), begin(m), end(m), slot(t) {}

    void start(const int64_t* cluster, const REAL* v, int64_t step) {
        std::fill(end.begin(), end.end(), 0);
        for (int64_t p = 0; p < t; p++)
            if (cluster[p] < m) end[cluster[p]] += 1;
        int64_t slots = 0;
        for (int64_t c = 0; c < m; c++) {
            begin[c] = slots, slots += up(end[c], TOGETHER);
            end[c] = begin[c];
        }
        token.assign(slots, -1), is_out.assign(slots, 0), out.assign(slots / TOGETHER, 0), sums.assign(slots / TOGETHER * e, 0);
        for (int64_t p = 0; p < t; p++) {
            slot[p] = -1;
            if (cluster[p] >= m) continue;
            slot[p] = end[cluster[p]]++;
            token[slot[p]] = p;
            add(&sums[slot[p] / TOGETHER * e], v + p * step, e);
        }
    }
    void mark(int64_t p, bool is) {
        is_out[slot[p]] = is, out[slot[p] / TOGETHER] += is ? 1 : -1;
    }
    // Call `all` for each group of a cluster of which no token is out, and `one` for each token of the others that is not.
    template <class All, class One>
    void visit(int64_t c, All all, One one) const {
        for (int64_t i = begin[c]; i < end[c]; i += TOGETHER) {
            if (!out[i / TOGETHER]) all(i / TOGETHER);
            else
                for (int64_t j = i; j < std::min(i + TOGETHER, end[c]); j++)
                    if (!is_out[j]) one(token[j]);
        }
    }
};

// The keys of each block: its window, heavy keys, clusters, and those that it selects.
struct Head {
    // Keys that are copied at a time: together they fill lines of the cache.
    static constexpr int64_t COPIED = 16;
    const Blocks& s;
    const bool back;
    const int64_t t = s.tokens, d = s.d, e = s.e, m = s.clusters, blocks = t / s.size, groups = (blocks + GROUP - 1) / GROUP;
    const int64_t heavy = s.size + 2 * s.reach, far = heavy + s.heavies, picked = far + m, length = picked + s.selects;
    const int64_t L = up(length, PAIR), D = up(d, PAIR), E = up(e, PAIR), tall = up(s.size, STRIP);
    // Tokens beside a block that are not summed over all blocks, and the width of a sum: a bias counts weights behind it.
    const int64_t outer = s.bias ? s.beside * s.size : s.reach, S = e + (s.bias ? 1 : 0);
    Numbers keys_t, values, keys, values_t, bias, count, left, number, means, before, after, later, nothing, mean, strip, of_query;
    InClusters members;
    Positions positions;
    std::vector<int64_t> marked, close;
    std::vector<uint8_t> loses;
    bool empty;
    const uint8_t* exists;
    const REAL *k, *v;
    const int64_t *cluster, *heavy_at, *selected;

    Head(const Blocks& s, bool back)
        : s(s), back(back), keys_t(d * L), values(L * E), keys(back * L * D), values_t(back * e * L), bias(L, NONE),
          count(m), left(m), number(m), means(m * d), before(m * S), after(GROUP * m * S), later(groups * m * S), nothing(std::max(d, e)),
          mean(s.bias ? m * S : e), strip(heavy + s.size), of_query(L, NONE), members(s.selects ? t : 0, e, s.selects ? m : 0), loses(m) {}

    int64_t first(int64_t block) const { return std::max<int64_t>(0, block * s.size - outer); }
    int64_t last(int64_t block) const { return std::min(t, (block + 1) * s.size + outer); }

    // Add values, or what tokens are given, of the tokens from `start` to `stop`, by clusters.
    void gather(REAL* sums, int64_t start, int64_t stop) const {
        for (int64_t p = start; p < stop; p++) {
            if (cluster[p] >= m) continue;
            add(sums + cluster[p] * S, v + p * s.v.token, e);
            if (s.bias) sums[cluster[p] * S + e] += 1;
        }
    }
    void give(const Numbers& sums, REAL* of_v, int64_t start, int64_t stop) const {
        for (int64_t p = start; p < stop; p++)
            if (cluster[p] < m) add(of_v + p * s.of_v.token, &sums[cluster[p] * e], e);
    }
    void put_value(int64_t i, const REAL* value) {
        memcpy(&values[i * E], value, e * sizeof(REAL));
        if (!back) return;
        for (int64_t j = 0; j < e; j++) values_t[j * L + i] = value[j];
    }
    void put(int64_t i, const REAL* key, const REAL* value) {
        for (int64_t j = 0; j < d; j++) keys_t[j * L + i] = key[j];
        if (back) memcpy(&keys[i * D], key, d * sizeof(REAL));
        put_value(i, value);
    }
    // The tokens at_of(0) ... as keys from i on; zeros for those outside the sequence.
    template <class At>
    void put_tokens(int64_t i, int64_t size, At at_of) {
        const REAL *key[COPIED], *value[COPIED];
        for (int64_t start = 0; start < size; start += COPIED) {
            const int64_t number = std::min(COPIED, size - start), here = i + start;
            for (int64_t c = 0; c < number; c++) {
                const int64_t p = at_of(start + c);
                const bool there = p >= 0 && p < t;
                key[c] = there ? k + p * s.k.token : nothing.data(), value[c] = there ? v + p * s.v.token : nothing.data();
                bias[here + c] = there && cluster[p] < m ? 0 : NONE;
                if (there && cluster[p] < m) left[cluster[p]] -= 1;
                memcpy(&values[(here + c) * E], value[c], e * sizeof(REAL));
                if (back) memcpy(&keys[(here + c) * D], key[c], d * sizeof(REAL));
            }
            for (int64_t j = 0; j < d; j++)
                for (int64_t c = 0; c < number; c++) keys_t[j * L + here + c] = key[c][j];
            for (int64_t j = 0; back && j < e; j++)
                for (int64_t c = 0; c < number; c++) values_t[j * L + here + c] = value[c][j];
        }
    }

    void start_clusters(int64_t row) {
        k = s.k.of(row), v = s.v.of(row), cluster = s.cluster + row * t, heavy_at = s.heavy + row * s.heavies;
        selected = s.selected + row * blocks * s.selects;
        exists = s.exists + row * s.heavies;
        for (Numbers* x : {&count, &means, &before}) std::fill(x->begin(), x->end(), 0);
        bool any = false;
        for (int64_t p = 0; p < t; p++) {
            if (cluster[p] >= m) continue;
            any = true, count[cluster[p]] += 1;
            add(&means[cluster[p] * d], k + p * s.k.token, d);
        }
        for (int64_t i = 0; i < s.heavies; i++) any |= exists[i];
        // A softmax over nothing may be NaN.
        if ((empty = !any)) count[0] = 1;
        for (int64_t c = 0; c < m; c++)
            for (int64_t j = 0; j < d; j++) means[c * d + j] /= std::max<REAL>(count[c], 1);
        if (s.selects) members.start(cluster, v, s.v.token);
        marked.clear();
    }

    void start(int64_t row) {
        start_clusters(row);
        for (int64_t i = 0; i < s.heavies; i++) {
            put(heavy + i, k + heavy_at[i] * s.k.token, v + heavy_at[i] * s.v.token);
            bias[heavy + i] = exists[i] ? 0 : NONE;
        }
        for (int64_t c = 0; c < m; c++) put(far + c, &means[c * d], nothing.data());
        if (s.bias) {
            positions = Positions(s, row);
            for (int64_t i = 0; i < heavy + s.size - 1; i++) strip[i] = positions.distance[positions.at(i - s.size + 1 - s.reach)];
        }
        // The values after the windows of each group, summed from the end: nothing is subtracted.
        int64_t stop = t;
        for (int64_t g = groups - 1; g >= 0; g--) {
            REAL* here = &later[g * m * S];
            if (g == groups - 1) std::fill(here, here + m * S, 0);
            else memcpy(here, here + m * S, m * S * sizeof(REAL));
            int64_t from = last(std::min(blocks, (g + 1) * GROUP) - 1);
            gather(here, from, stop);
            stop = from;
        }
    }

    // The keys that the block selects; its clusters that lose any are marked.
    void select(int64_t block) {
        const int64_t* chosen = selected + block * s.selects;
        for (int64_t p : marked) members.mark(p, false);
        marked.clear();
        std::fill(loses.begin(), loses.end(), 0);
        put_tokens(picked, s.selects, [&](int64_t i) { return chosen[i]; });
        for (int64_t p = first(block); p < last(block); p++)
            if (cluster[p] < m) marked.push_back(p);
        for (int64_t i = 0; i < s.selects; i++)
            if (chosen[i] >= 0) marked.push_back(chosen[i]), loses[cluster[chosen[i]]] = 1;
        for (int64_t p : marked) members.mark(p, true);
    }

    void fill(int64_t block) {
        const int64_t g = block / GROUP, begin = g * GROUP, end = std::min(blocks, begin + GROUP), from = block * s.size - s.reach;
        if (block == begin) {
            memcpy(&after[(end - 1 - begin) * m * S], &later[g * m * S], m * S * sizeof(REAL));
            for (int64_t b = end - 2; b >= begin; b--) {
                memcpy(&after[(b - begin) * m * S], &after[(b + 1 - begin) * m * S], m * S * sizeof(REAL));
                gather(&after[(b - begin) * m * S], last(b), last(b + 1));
            }
        }
        if (block) gather(before.data(), first(block - 1), first(block));
        left = count;
        put_tokens(0, heavy, [&](int64_t i) { return from + i; });
        if (s.selects) select(block);
        if (s.bias) return fill_by_positions(block, &after[(block - begin) * m * S]);
        for (int64_t c = 0; c < m; c++) {
            const REAL *a = &before[c * e], *b = &after[((block - begin) * m + c) * e], number = this->number[c] = std::max<REAL>(left[c], 1);
            if (loses[c]) {
                // Summed anew: nothing is subtracted.
                std::fill(mean.begin(), mean.end(), 0);
                members.visit(c, [&](int64_t group) { add(mean.data(), &members.sums[group * e], e); },
                              [&](int64_t p) { add(mean.data(), v + p * s.v.token, e); });
                for (int64_t j = 0; j < e; j++) mean[j] /= number;
            } else {
                for (int64_t j = 0; j < e; j++) mean[j] = (a[j] + b[j]) / number;
            }
            put_value(far + c, mean.data());
            bias[far + c] = std::log(left[c]);
        }
    }

    // Call `what` for each token of a cluster beside the window of a block, with its place in the weights around the block.
    template <class What>
    void visit_around(int64_t block, What what) const {
        const int64_t from = block * s.size - s.reach, to = from + heavy, origin = block * s.size - outer;
        for (int64_t p = first(block); p < last(block); p++) {
            if (p == from) p = to;
            if (p < last(block) && cluster[p] < m) what(p, p - origin);
        }
    }
    // Clusters by the weights of their keys, and the heavy keys; those whose bias differs between queries are close.
    void fill_by_positions(int64_t block, const REAL* after) {
        std::fill(mean.begin(), mean.end(), 0);
        visit_around(block, [&](int64_t p, int64_t place) {
            add(&mean[cluster[p] * S], v + p * s.v.token, e, positions.around[place]);
            mean[cluster[p] * S + e] += positions.around[place];
        });
        add(mean.data(), before.data(), m * S, positions.sides[0]);
        add(mean.data(), after, m * S, positions.sides[1]);
        if (empty) mean[e] += 1;
        for (int64_t c = 0; c < m; c++) {
            REAL* sum = &mean[c * S];
            number[c] = sum[e] > 0 ? sum[e] : 1;
            for (int64_t j = 0; j < e; j++) sum[j] /= number[c];
            put_value(far + c, sum);
            bias[far + c] = sum[e] > 0 ? std::log(sum[e]) + positions.sides[2] : NONE;
        }
        close.clear();
        for (int64_t i = 0; i < s.heavies; i++) {
            if (!exists[i]) continue;
            const int64_t between = heavy_at[i] - block * s.size;
            const bool left = between <= -positions.furthest, right = between - s.size + 1 >= positions.furthest;
            bias[heavy + i] = left || right ? positions.distance[positions.at(between)] : 0;
            if (!left && !right) close.push_back(i);
        }
    }
    // The bias of all keys of the block, for its i-th query.
    const REAL* bias_of(int64_t block, int64_t i) {
        if (!s.bias) return bias.data();
        memcpy(&of_query[heavy], &bias[heavy], (L - heavy) * sizeof(REAL));
        for (int64_t j = 0; j < heavy; j++) of_query[j] = bias[j] + strip[s.size - 1 - i + j];
        for (int64_t j : close) of_query[heavy + j] = positions.distance[positions.at(heavy_at[j] - block * s.size - i)];
        return of_query.data();
    }
};

// The gradient of a bias of positions, of one head.
struct OfPositions {
    Head& h;
    const Positions& at;
    std::vector<double> distance, around, sides;
    Numbers strip, scores;
    explicit OfPositions(Head& h) : h(h), at(h.positions), strip(h.strip.size()), scores(h.L) {}

    void start() {
        distance.assign(2 * at.furthest + 1, 0), around.assign(at.width, 0), sides.assign(2, 0);
        std::fill(scores.begin(), scores.end(), 0);
    }
    // Add the scores of the i-th query of a block.
    void add_query(int64_t block, int64_t i, const REAL* given) {
        add(&strip[h.s.size - 1 - i], given, h.heavy);
        add(&scores[h.heavy], given + h.heavy, h.picked - h.heavy);
        for (int64_t j : h.close) {
            distance[at.at(h.heavy_at[j] - block * h.s.size - i)] += given[h.heavy + j];
            scores[h.heavy + j] = 0;
        }
    }
    // Add all queries of a block and the shares of its clusters; the values beside its window get theirs.
    void add_block(int64_t block, const REAL* share, REAL* of_v) {
        for (int64_t i = 0; i < h.heavy + h.s.size - 1; i++) distance[at.at(i - h.s.size + 1 - h.s.reach)] += strip[i];
        for (int64_t i = 0; i < h.s.heavies; i++) distance[at.at(h.heavy_at[i] - block * h.s.size)] += scores[h.heavy + i];
        const REAL *before = h.before.data(), *after = &h.after[block % GROUP * h.m * h.S];
        REAL* of_count = &scores[h.far];
        for (int64_t c = 0; c < h.m; c++) {
            REAL less = 0, left = 0, right = 0;
            for (int64_t j = 0; j < h.e; j++) {
                less += share[c * h.e + j] * h.mean[c * h.S + j];
                left += share[c * h.e + j] * before[c * h.S + j], right += share[c * h.e + j] * after[c * h.S + j];
            }
            of_count[c] = of_count[c] / h.number[c] - less;
            sides[0] += left + of_count[c] * before[c * h.S + h.e], sides[1] += right + of_count[c] * after[c * h.S + h.e];
        }
        h.visit_around(block, [&](int64_t p, int64_t place) {
            const REAL *value = h.v + p * h.s.v.token, *given = share + h.cluster[p] * h.e;
            REAL sum = of_count[h.cluster[p]];
            for (int64_t j = 0; j < h.e; j++) sum += given[j] * value[j];
            around[place] += sum;
            add(of_v + p * h.s.of_v.token, given, h.e, at.around[place]);
        });
        std::fill(strip.begin(), strip.end(), 0), std::fill(scores.begin(), scores.end(), 0);
    }
    void write(REAL* to) const {
        for (const auto* part : {&distance, &around, &sides}) to = std::copy(part->begin(), part->end(), to);
        *to = 0;
    }
};

// The keys that each block selects, see `selected_keys`.
extern "C" void blocks_select(const Blocks* given, int64_t begin, int64_t end) {
    constexpr int64_t QUERIES = 16, FOUR = 4, PLACES = 1 << 30;
    const Blocks& s = *given;
    Head h(s, false);
    const int64_t t = h.t, d = h.d, e = h.e, m = h.m, r = s.selects, number = 4 * r, F = up(s.heavies + m, PAIR);
    const int64_t stretches = (s.size + QUERIES - 1) / QUERIES, P = up(stretches, FOUR);
    const auto level = [](REAL x) { return (int64_t)std::nearbyint((x > -4194304 ? x < 4194304 ? x : (REAL)4194304 : (REAL)-4194304) * 1024); };
    const auto log_of = [](REAL x) {
        return std::log(std::min(std::max(x, std::numeric_limits<REAL>::min()), std::numeric_limits<REAL>::max()));
    };
    Numbers far_t(d * F), bias(F, NONE), q(P * d), scores(P * F), total(P), value(e), distance(t), spread(m), panels, products, best, far(F);
    std::vector<int64_t> at(m), clusters, keys;
    for (int64_t row = begin; row < end; row++) {
        h.start_clusters(row);
        const InClusters& in = h.members;
        int64_t size = 0, widest = 0;
        for (int64_t c = 0; c < m; c++) {
            const int64_t wide = up(in.end[c] - in.begin[c], PAIR);
            at[c] = size, size += wide * d, widest = std::max(widest, wide);
        }
        panels.assign(size, 0), products.resize(P * widest), best.resize(widest);
        for (int64_t i = 0; i < s.heavies; i++) {
            for (int64_t j = 0; j < d; j++) far_t[j * F + i] = h.k[h.heavy_at[i] * s.k.token + j];
            bias[i] = s.exists[row * s.heavies + i] ? 0 : NONE;
        }
        for (int64_t c = 0; c < m; c++) {
            const int64_t first = in.begin[c], count = in.end[c] - first, wide = up(count, PAIR);
            for (int64_t j = 0; j < d; j++) far_t[j * F + s.heavies + c] = h.means[c * d + j];
            bias[s.heavies + c] = std::log(h.count[c]);
            std::fill(value.begin(), value.end(), 0);
            for (int64_t i = first; i < in.end[c]; i += InClusters::TOGETHER) add(value.data(), &in.sums[i / InClusters::TOGETHER * e], e);
            for (int64_t j = 0; j < e; j++) value[j] /= std::max<int64_t>(count, 1);
            REAL sum = 0;
            for (int64_t i = 0; i < count; i++) {
                const int64_t p = in.token[first + i];
                REAL off = 0;
                for (int64_t j = 0; j < e; j++) off += std::abs(h.v[p * s.v.token + j] - value[j]);
                distance[p] = log_of(off), sum += off;
                for (int64_t j = 0; j < d; j++) panels[at[c] + j * wide + i] = h.k[p * s.k.token + j];
            }
            spread[c] = log_of(sum / std::max<int64_t>(count, 1));
        }
        for (int64_t block = 0; block < h.blocks; block++) {
            // The means of the real queries of each stretch, and the sum of the softmax of each.
            std::fill(q.begin(), q.end(), 0);
            for (int64_t i = 0; i < stretches; i++) {
                const int64_t first = block * s.size + i * QUERIES, last = std::min(first + QUERIES, (block + 1) * s.size);
                int64_t count = 0;
                for (int64_t p = first; p < last; p++) {
                    if (!s.real[row * t + p]) continue;
                    count += 1;
                    add(&q[i * d], s.q.of(row) + p * s.q.token, d);
                }
                for (int64_t j = 0; j < d; j++) q[i * d + j] *= (REAL)s.scale / std::max<int64_t>(count, 1);
                total[i] = count ? 0 : -NONE;
            }
            product<false, false, FOUR>(q.data(), d, far_t.data(), F, scores.data(), F, P, d, F);
            for (int64_t c = 0; c < m; c++) far[c] = NONE;
            for (int64_t i = 0; i < stretches; i++) {
                const REAL* x = &scores[i * F];
                Vec largest = load(x) + load(bias.data()), sum = {};
                for (int64_t j = 0; j < F; j += N) {
                    const Vec here = load(x + j) + load(&bias[j]);
                    largest = here > largest ? here : largest;
                }
                const REAL top = reduce(largest, [](REAL a, REAL b) { return a > b ? a : b; });
                for (int64_t j = 0; j < F; j += N) sum += exp_of(load(x + j) + load(&bias[j]) - top);
                total[i] += top + std::log(reduce(sum, std::plus<REAL>()));
                for (int64_t c = 0; c < m; c++) far[c] = std::max(far[c], x[s.heavies + c] - total[i]);
            }
            // A heap of the clusters, of which each key holds the loss and, counted down, the number.
            clusters.clear(), keys.clear();
            for (int64_t c = 0; c < m; c++)
                if (in.end[c] > in.begin[c]) clusters.push_back(level(far[c] + spread[c]) * PLACES + PLACES - 1 - c);
            std::make_heap(clusters.begin(), clusters.end());
            for (int64_t seen = 0; seen < number && !clusters.empty();) {
                std::pop_heap(clusters.begin(), clusters.end());
                const int64_t c = PLACES - 1 - (clusters.back() & (PLACES - 1)), wide = up(in.end[c] - in.begin[c], PAIR);
                clusters.pop_back();
                const int64_t count = std::min(number - seen, in.end[c] - in.begin[c]), columns = up(count, PAIR);
                seen += count;
                product<false, false, FOUR>(q.data(), d, &panels[at[c]], wide, products.data(), wide, P, d, columns);
                for (int64_t j = 0; j < columns; j += N) {
                    Vec most = load(&products[j]) - total[0];
                    for (int64_t i = 1; i < stretches; i++) {
                        const Vec here = load(&products[i * wide + j]) - total[i];
                        most = here > most ? here : most;
                    }
                    store(&best[j], most);
                }
                for (int64_t i = 0; i < count; i++) {
                    const int64_t p = in.token[in.begin[c] + i];
                    if (p < h.first(block) || p >= h.last(block)) keys.push_back(level(best[i] + distance[p]) * PLACES + PLACES - 1 - p);
                }
            }
            const int64_t some = std::min<int64_t>(r, keys.size());
            if (some < (int64_t)keys.size()) std::nth_element(keys.begin(), keys.begin() + some, keys.end(), std::greater<int64_t>());
            int64_t* to = s.selected + (row * h.blocks + block) * r;
            for (int64_t i = 0; i < r; i++) to[i] = i < some ? PLACES - 1 - (keys[i] & (PLACES - 1)) : -1;
        }
    }
}

extern "C" void blocks_forward(const Blocks* given, int64_t begin, int64_t end) {
    const Blocks& s = *given;
    Head h(s, false);
    Numbers queries(STRIP * h.d), scores(STRIP * h.L), out(STRIP * h.E);
    for (int64_t row = begin; row < end; row++) {
        h.start(row);
        for (int64_t block = 0; block < h.blocks; block++) {
            h.fill(block);
            for (int64_t r = 0; r < s.size; r += STRIP) {
                const int64_t rows = std::min(STRIP, s.size - r), p = block * s.size + r;
                for (int64_t i = 0; i < rows; i++)
                    memcpy(&queries[i * h.d], s.q.of(row) + (p + i) * s.q.token, h.d * sizeof(REAL));
                product(queries.data(), h.d, h.keys_t.data(), h.L, scores.data(), h.L, STRIP, h.d, h.L);
                REAL inverse[STRIP];
                for (int64_t i = 0; i < rows; i++) inverse[i] = softmax(&scores[i * h.L], h.bias_of(block, r + i), s.scale, h.L);
                product(scores.data(), h.L, h.values.data(), h.E, out.data(), h.E, STRIP, h.length, h.E);
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t j = 0; j < h.e; j++)
                        s.out.of(row)[(p + i) * s.out.token + j] = out[i * h.E + j] * inverse[i];
            }
        }
    }
}

extern "C" void blocks_backward(const Blocks* given, int64_t begin, int64_t end) {
    const Blocks& s = *given;
    Head h(s, true);
    const int64_t L = h.L, D = h.D, E = h.E, d = h.d, e = h.e, m = h.m, me = m * e;
    Numbers q(h.tall * D), grad(h.tall * E), weights(h.tall * L), of_scores(h.tall * L), of_q(h.tall * D), of_keys(L * D),
        of_values(L * E), heavy_k(s.heavies * d), heavy_v(s.heavies * e), of_means(m * d), shares(GROUP * me), given_now(me),
        run(me), totals(h.groups * me), of_groups, given_scores(L);
    OfPositions of_positions(h);
    for (int64_t row = begin; row < end; row++) {
        REAL *of_k = s.of_k.of(row), *of_v = s.of_v.of(row);
        h.start(row);
        if (s.bias) of_positions.start();
        for (Numbers* x : {&heavy_k, &heavy_v, &of_means, &given_now, &totals}) std::fill(x->begin(), x->end(), 0);
        of_groups.assign(h.members.sums.size(), 0);
        for (int64_t p = 0; p < h.t; p++) {
            std::fill_n(of_k + p * s.of_k.token, d, 0);
            std::fill_n(of_v + p * s.of_v.token, e, 0);
        }
        for (int64_t block = 0; block < h.blocks; block++) {
            const int64_t g = block / GROUP, place = block % GROUP, from = block * s.size - s.reach;
            h.fill(block);
            for (int64_t i = 0; i < s.size; i++) {
                memcpy(&q[i * D], s.q.of(row) + (block * s.size + i) * s.q.token, d * sizeof(REAL));
                memcpy(&grad[i * E], s.grad.of(row) + (block * s.size + i) * s.grad.token, e * sizeof(REAL));
            }
            product(q.data(), D, h.keys_t.data(), L, weights.data(), L, h.tall, d, L);
            product(grad.data(), E, h.values_t.data(), L, of_scores.data(), L, h.tall, e, L);
            for (int64_t i = 0; i < s.size; i++) {
                const REAL* out = s.out.of(row) + (block * s.size + i) * s.out.token;
                const REAL inverse = softmax(&weights[i * L], h.bias_of(block, i), s.scale, L);
                REAL both = 0;
                for (int64_t j = 0; j < e; j++) both += grad[i * E + j] * out[j];
                for (int64_t j = 0; j < L; j += N) {
                    const Vec weight = load(&weights[i * L + j]) * inverse, given = weight * (load(&of_scores[i * L + j]) - both);
                    store(&weights[i * L + j], weight);
                    store(&given_scores[j], given);
                    store(&of_scores[i * L + j], given * (REAL)s.scale);
                }
                if (s.bias) of_positions.add_query(block, i, given_scores.data());
            }
            product(of_scores.data(), L, h.keys.data(), D, of_q.data(), D, h.tall, h.length, D);
            product<true>(weights.data(), L, grad.data(), E, of_values.data(), E, L, s.size, E);
            product<true>(of_scores.data(), L, q.data(), D, of_keys.data(), D, L, s.size, D);
            for (int64_t i = 0; i < s.size; i++)
                memcpy(s.of_q.of(row) + (block * s.size + i) * s.of_q.token, &of_q[i * D], d * sizeof(REAL));
            for (int64_t i = 0; i < h.heavy; i++) {
                const int64_t p = from + i;
                if (p < 0 || p >= h.t) continue;
                add(of_k + p * s.of_k.token, &of_keys[i * D], d);
                add(of_v + p * s.of_v.token, &of_values[i * E], e);
            }
            for (int64_t i = 0; i < s.selects; i++) {
                const int64_t p = h.selected[block * s.selects + i];
                if (p < 0) continue;
                add(of_k + p * s.of_k.token, &of_keys[(h.picked + i) * D], d);
                add(of_v + p * s.of_v.token, &of_values[(h.picked + i) * E], e);
            }
            for (int64_t i = 0; i < s.heavies; i++) {
                add(&heavy_k[i * d], &of_keys[(h.heavy + i) * D], d);
                add(&heavy_v[i * e], &of_values[(h.heavy + i) * E], e);
            }
            REAL* share = &shares[place * me];
            for (int64_t c = 0; c < m; c++) {
                add(&of_means[c * d], &of_keys[(h.far + c) * D], d);
                for (int64_t j = 0; j < e; j++) share[c * e + j] = of_values[(h.far + c) * E + j] / h.number[c];
                if (!h.loses[c]) continue;
                h.members.visit(c, [&](int64_t group) { add(&of_groups[group * e], share + c * e, e); },
                                [&](int64_t p) { add(of_v + p * s.of_v.token, share + c * e, e); });
                std::fill_n(share + c * e, e, 0);
            }
            // A block gives to the tokens after its window, then to those before it; by groups, from the end.
            if (s.bias) of_positions.add_block(block, share, of_v);
            add(given_now.data(), share, me, s.bias ? h.positions.sides[1] : 1);
            for (int64_t j = 0; s.bias && j < me; j++) share[j] *= h.positions.sides[0];
            add(&totals[g * me], share, me);
            if (block + 1 < h.blocks) h.give(given_now, of_v, h.last(block), h.last(block + 1));
            if (place + 1 < GROUP && block + 1 < h.blocks) continue;
            std::fill(run.begin(), run.end(), 0);
            for (int64_t b = block - 1; b >= g * GROUP; b--) {
                add(run.data(), &shares[(b + 1 - g * GROUP) * me], me);
                h.give(run, of_v, h.first(b), h.first(b + 1));
            }
        }
        std::fill(run.begin(), run.end(), 0);
        for (int64_t g = h.groups - 1; g > 0; g--) {
            add(run.data(), &totals[g * me], me);
            h.give(run, of_v, h.first((g - 1) * GROUP), h.first(g * GROUP));
        }
        for (int64_t p = 0; p < h.t; p++) {
            const int64_t c = h.cluster[p];
            if (c < m) add(of_k + p * s.of_k.token, &of_means[c * d], d, 1 / std::max<REAL>(h.count[c], 1));
            if (c < m && s.selects) add(of_v + p * s.of_v.token, &of_groups[h.members.slot[p] / InClusters::TOGETHER * e], e);
        }
        for (int64_t i = 0; i < s.heavies; i++) {
            add(of_k + h.heavy_at[i] * s.of_k.token, &heavy_k[i * d], d);
            add(of_v + h.heavy_at[i] * s.of_v.token, &heavy_v[i * e], e);
        }
        if (s.bias) of_positions.write(s.of_bias + row * h.positions.size());
    }
}

// Tokens that are at hand at a time.
constexpr int64_t STRETCH = 64;

struct Landmarks {
    Rows q, landmarks, middle, v, to, out, grad, of_q, of_landmarks, of_middle, of_v, of_w, w, bias, sums;
    int64_t tokens, d, e, landmarks_count, taps;
    double scale;
};

// A stretch of tokens, and `more` before and after it, as rows of `width` numbers; zeros outside the sequence.
static void copy(const Rows& from, int64_t row, int64_t start, int64_t stop, int64_t tokens, int64_t size, REAL* to, int64_t width) {
    for (int64_t p = start; p < stop; p++, to += width) {
        if (p >= 0 && p < tokens) memcpy(to, from.of(row) + p * from.token, size * sizeof(REAL));
        else std::fill_n(to, size, 0);
    }
}

static void read_taps(const Landmarks& s, int64_t row, bool reversed, REAL* to) {
    const REAL* w = s.w.of(row);
    for (int64_t i = 0; i < s.taps; i++) to[i] = w[reversed ? s.taps - 1 - i : i];
}

// out_i = sum_t w_t x_{i + t}, for STRIP rows. Each takes its own tokens alone: times zero, NaN would stay.
static void convolve(const REAL* w, int64_t taps, const REAL* x, int64_t width, REAL* out) {
    for (int64_t j = 0; j < width; j += N) {
        Vec sum[STRIP] = {};
        for (int64_t p = 0; p < taps + STRIP - 1; p++) {
            const Vec here = load(x + p * width + j);
            for (int64_t i = 0; i < STRIP; i++)
                if (p >= i && p - i < taps) sum[i] += w[p - i] * here;
        }
        for (int64_t i = 0; i < STRIP; i++) store(out + i * width + j, sum[i]);
    }
}

// Rows of a vector more than they need: at a power of two, all would share few places of the cache.
struct Factors {
    const Landmarks& s;
    const int64_t m = s.landmarks_count, M = up(m, PAIR), wide = M + N, D = up(s.d, PAIR), E = up(s.e, PAIR);
    Numbers keys, keys_t, middle, middle_t, bias;
    explicit Factors(const Landmarks& s) : s(s), keys(M * D), keys_t(s.d * wide), middle(M * E), middle_t(s.e * wide), bias(M, NONE) {}

    void start(int64_t row) {
        copy(s.landmarks, row, 0, m, m, s.d, keys.data(), D);
        if (s.middle.at) copy(s.middle, row, 0, m, m, s.e, middle.data(), E);
        for (int64_t c = 0; c < m; c++) {
            bias[c] = s.bias.at && !s.sums.at ? s.bias.of(row)[c] : 0;
            for (int64_t j = 0; j < s.d; j++) keys_t[j * wide + c] = keys[c * D + j];
            for (int64_t j = 0; j < s.e; j++) middle_t[j * wide + c] = middle[c * E + j];
        }
    }
};

// The attention to landmarks, if there are any, and the convolution, and `to`. A row is a share of the tokens of a
// sequence, of all heads: these may lie side by side.
extern "C" void landmarks_forward(const Landmarks* given, int64_t begin, int64_t end) {
    const Landmarks& s = *given;
    const int64_t heads = s.out.heads, before = s.taps / 2, stretches = (s.tokens + STRETCH - 1) / STRETCH;
    std::vector<Factors> factors(heads, Factors(s));
    std::vector<Numbers> taps(heads, Numbers(s.taps));
    const int64_t M = factors[0].M, E = factors[0].E, m = factors[0].m;
    int64_t ready = -1;
    Numbers window((STRETCH + s.taps - 1) * E), q(STRETCH * s.d), scores(STRETCH * M), sums(STRETCH * E), skip(STRIP * E), inverse(STRETCH);
    for (int64_t share = begin; share < end; share++) {
        const int64_t sequence = share / heads, part = share % heads;
        const int64_t first = part * stretches / heads * STRETCH, last = std::min(s.tokens, (part + 1) * stretches / heads * STRETCH);
        if (first >= last) continue;
        for (int64_t head = 0; head < heads && ready != sequence; head++) {
            factors[head].start(sequence * heads + head);
            if (s.v.at) read_taps(s, sequence * heads + head, false, taps[head].data());
        }
        ready = sequence;
        for (int64_t start = first; start < last; start += STRETCH) {
            for (int64_t head = 0; head < heads; head++) {
                const int64_t row = sequence * heads + head;
                const Factors& f = factors[head];
                const int64_t rows = std::min(STRETCH, last - start);
                if (m) {
                    copy(s.q, row, start, start + STRETCH, s.tokens, s.d, q.data(), s.d);
                    product(q.data(), s.d, f.keys_t.data(), f.wide, scores.data(), M, STRETCH, s.d, M);
                    for (int64_t i = 0; i < STRETCH; i++) inverse[i] = softmax(&scores[i * M], f.bias.data(), s.scale, M);
                    product(scores.data(), M, f.middle.data(), E, sums.data(), E, STRETCH, m, E);
                }
                if (s.v.at) copy(s.v, row, start - before, start - before + STRETCH + s.taps - 1, s.tokens, s.e, window.data(), E);
                for (int64_t i = 0; i < rows; i++) {
                    if (s.v.at && i % STRIP == 0) convolve(taps[head].data(), s.taps, &window[i * E], E, skip.data());
                    REAL* here = s.out.of(row) + (start + i) * s.out.token;
                    const REAL *more = s.to.at ? s.to.of(row) + (start + i) * s.to.token : nullptr, *added = &skip[i % STRIP * E];
                    for (int64_t j = 0; j < s.e; j++) here[j] = sums[i * E + j] * inverse[i] + added[j] + (more ? more[j] : 0);
                }
            }
        }
    }
}

// The landmarks' attention to the tokens, as if they were queries, and the logarithm of the sum of each.
extern "C" void tokens_forward(const Landmarks* given, int64_t begin, int64_t end) {
    const Landmarks& s = *given;
    Factors f(s);
    const int64_t m = f.m, M = f.M, E = f.E;
    Numbers k(STRETCH * s.d), v(STRETCH * E), weights(STRETCH * M), out(M * E), top(M), total(M), shrink(M);
    for (int64_t row = begin; row < end; row++) {
        f.start(row);
        std::fill(out.begin(), out.end(), 0);
        std::fill(total.begin(), total.end(), 0);
        std::fill(top.begin(), top.end(), std::numeric_limits<REAL>::lowest());
        for (int64_t start = 0; start < s.tokens; start += STRETCH) {
            const int64_t rows = std::min(STRETCH, s.tokens - start);
            const REAL* bias = s.bias.at ? s.bias.of(row) + start : nullptr;
            copy(s.q, row, start, start + STRETCH, s.tokens, s.d, k.data(), s.d);
            copy(s.v, row, start, start + STRETCH, s.tokens, s.e, v.data(), E);
            product(k.data(), s.d, f.keys_t.data(), f.wide, weights.data(), M, STRETCH, s.d, M);
            for (int64_t j = 0; j < M; j += N) {
                const Vec before = load(&top[j]);
                Vec largest = before;
                for (int64_t i = 0; i < rows; i++) {
                    const Vec here = load(&weights[i * M + j]) * (REAL)s.scale + (bias ? bias[i] : 0);
                    store(&weights[i * M + j], here);
                    largest = here > largest ? here : largest;
                }
                const Vec less = exp_of(before - largest);
                Vec sum = load(&total[j]) * less;
                for (int64_t i = 0; i < rows; i++) {
                    const Vec weight = exp_of(load(&weights[i * M + j]) - largest);
                    store(&weights[i * M + j], weight);
                    sum += weight;
                }
                store(&top[j], largest), store(&total[j], sum), store(&shrink[j], less);
            }
            for (int64_t c = 0; c < m; c++)
                for (int64_t j = 0; j < E && shrink[c] != 1; j++) out[c * E + j] *= shrink[c];
            product<true, true>(weights.data(), M, v.data(), E, out.data(), E, M, rows, E);
        }
        for (int64_t c = 0; c < m; c++) {
            for (int64_t j = 0; j < s.e; j++) s.out.of(row)[c * s.out.token + j] = out[c * E + j] / total[c];
            s.sums.of(row)[c] = top[c] + std::log(total[c]);
        }
    }
}

// Gradients of the attention of tokens to landmarks, or of landmarks to TOKENS, of which `middle` is the coming gradient.
template <bool TOKENS>
static void attention_backward(const Landmarks& s, int64_t begin, int64_t end) {
    Factors f(s);
    const int64_t m = f.m, M = f.M, D = f.D, E = f.E;
    Numbers q(STRETCH * D), other(STRETCH * E), weights(STRETCH * M), of_scores(STRETCH * M), of_q(STRETCH * D), of_keys(M * D),
        of_other((TOKENS ? STRETCH : M) * E), sums(M), both(M);
    const Rows &values = TOKENS ? s.v : s.grad, &of_values = TOKENS ? s.of_v : s.of_middle;
    for (int64_t row = begin; row < end; row++) {
        f.start(row);
        std::fill(of_keys.begin(), of_keys.end(), 0);
        std::fill(of_other.begin(), of_other.end(), 0);
        for (int64_t c = 0; TOKENS && c < m; c++) {
            sums[c] = s.sums.of(row)[c], both[c] = 0;
            for (int64_t j = 0; j < s.e; j++) both[c] += f.middle[c * E + j] * s.out.of(row)[c * s.out.token + j];
        }
        for (int64_t start = 0; start < s.tokens; start += STRETCH) {
            const int64_t rows = std::min(STRETCH, s.tokens - start);
            copy(s.q, row, start, start + STRETCH, s.tokens, s.d, q.data(), D);
            copy(values, row, start, start + STRETCH, s.tokens, s.e, other.data(), E);
            product(q.data(), D, f.keys_t.data(), f.wide, weights.data(), M, STRETCH, s.d, M);
            product(other.data(), E, f.middle_t.data(), f.wide, of_scores.data(), M, STRETCH, s.e, M);
            for (int64_t i = 0; i < rows; i++) {
                REAL *weight = &weights[i * M], *score = &of_scores[i * M], inverse = 1, less = 0;
                if (TOKENS) {
                    const REAL bias = s.bias.at ? s.bias.of(row)[start + i] : 0;
                    for (int64_t j = 0; j < M; j += N)
                        store(weight + j, exp_of(load(weight + j) * (REAL)s.scale + bias - load(&sums[j])));
                } else {
                    inverse = softmax(weight, f.bias.data(), s.scale, M);
                    Vec sum = {};
                    for (int64_t j = 0; j < M; j += N) {
                        store(weight + j, load(weight + j) * inverse);
                        sum += load(weight + j) * load(score + j);
                    }
                    less = reduce(sum, std::plus<REAL>());
                }
                for (int64_t j = 0; j < M; j += N)
                    store(score + j, load(weight + j) * (load(score + j) - (TOKENS ? load(&both[j]) : Vec{} + less)) * (REAL)s.scale);
            }
            if (TOKENS && of_values.at) product(weights.data(), M, f.middle.data(), E, of_other.data(), E, STRETCH, m, E);
            if (!TOKENS) product<true, true>(weights.data(), M, other.data(), E, of_other.data(), E, M, rows, E);
            product<true, true>(of_scores.data(), M, q.data(), D, of_keys.data(), D, M, rows, D);
            for (int64_t i = 0; TOKENS && of_values.at && i < rows; i++)
                memcpy(of_values.of(row) + (start + i) * of_values.token, &of_other[i * E], s.e * sizeof(REAL));
            if (!s.of_q.at) continue;
            product(of_scores.data(), M, f.keys.data(), D, of_q.data(), D, STRETCH, m, D);
            for (int64_t i = 0; i < rows; i++)
                memcpy(s.of_q.of(row) + (start + i) * s.of_q.token, &of_q[i * D], s.d * sizeof(REAL));
        }
        for (int64_t c = 0; c < m; c++) {
            memcpy(s.of_landmarks.of(row) + c * s.of_landmarks.token, &of_keys[c * D], s.d * sizeof(REAL));
            if (!TOKENS) memcpy(of_values.of(row) + c * of_values.token, &of_other[c * E], s.e * sizeof(REAL));
        }
    }
}

extern "C" void landmarks_backward(const Landmarks* s, int64_t begin, int64_t end) { attention_backward<false>(*s, begin, end); }
extern "C" void tokens_backward(const Landmarks* s, int64_t begin, int64_t end) { attention_backward<true>(*s, begin, end); }

// Gradients of the convolution: of the values, to which `to` is added, and of the taps of each row.
extern "C" void convolution_backward(const Landmarks* given, int64_t begin, int64_t end) {
    const Landmarks& s = *given;
    const int64_t E = up(s.e, PAIR), before = s.taps / 2, after = s.taps - 1 - before, taps = up(s.taps, STRIP);
    Numbers w(s.taps), grad((STRETCH + s.taps - 1) * E), v((STRETCH + taps - 1) * E), out(STRIP * E), of_w(taps * N);
    for (int64_t row = begin; row < end; row++) {
        read_taps(s, row, true, w.data());
        std::fill(of_w.begin(), of_w.end(), 0);
        for (int64_t start = 0; start < s.tokens; start += STRETCH) {
            copy(s.grad, row, start - after, start + STRETCH + before, s.tokens, s.e, grad.data(), E);
            for (int64_t p = start; p < std::min(s.tokens, start + STRETCH); p += STRIP) {
                convolve(w.data(), s.taps, &grad[(p - start) * E], E, out.data());
                for (int64_t i = 0; i < std::min(STRIP, s.tokens - p); i++) {
                    REAL* here = s.of_v.of(row) + (p + i) * s.of_v.token;
                    const REAL* more = s.to.at ? s.to.of(row) + (p + i) * s.to.token : nullptr;
                    for (int64_t j = 0; j < s.e; j++) here[j] = out[i * E + j] + (more ? more[j] : 0);
                }
            }
            if (!s.of_w.at) continue;
            copy(s.v, row, start - before, start - before + STRETCH + taps - 1, s.tokens, s.e, v.data(), E);
            for (int64_t t = 0; t < taps; t += STRIP) {
                Vec sum[STRIP] = {};
                for (int64_t i = 0; i < std::min(STRETCH, s.tokens - start); i++)
                    for (int64_t j = 0; j < E; j += N) {
                        const Vec coming = load(&grad[(after + i) * E + j]);
                        for (int64_t k = 0; k < STRIP; k++) sum[k] += coming * load(&v[(i + t + k) * E + j]);
                    }
                for (int64_t k = 0; k < STRIP; k++) store(&of_w[(t + k) * N], load(&of_w[(t + k) * N]) + sum[k]);
            }
        }
        if (!s.of_w.at) continue;
        for (int64_t t = 0; t < s.taps; t++) {
            REAL& sum = s.of_w.of(row)[t] = 0;
            for (int64_t j = 0; j < N; j++) sum += of_w[t * N + j];
        }
    }
}

// The mean of each of the m segments, into which the tokens i of a row are cut by i m / n, by sums of sums of stretches.
extern "C" void means_forward(const Landmarks* given, int64_t begin, int64_t end) {
    const Landmarks& s = *given;
    const int64_t m = s.landmarks_count;
    Numbers part(s.d);
    for (int64_t row = begin; row < end; row++) {
        for (int64_t c = 0; c < m; c++) {
            const int64_t first = (c * s.tokens + m - 1) / m, last = ((c + 1) * s.tokens + m - 1) / m;
            REAL* sum = s.landmarks.of(row) + c * s.landmarks.token;
            std::fill_n(sum, s.d, 0);
            for (int64_t p = first; p < last; p += STRETCH) {
                std::fill(part.begin(), part.end(), 0);
                for (int64_t i = p; i < std::min(p + STRETCH, last); i++) add(part.data(), s.q.of(row) + i * s.q.token, s.d);
                add(sum, part.data(), s.d);
            }
            for (int64_t j = 0; j < s.d; j++) sum[j] /= last - first;
        }
    }
}

// The last of the landmarks c, with q.c + bias less than `scale` times (|q|^2 - the largest) below the largest of a token.
extern "C" void nearest_forward(const Landmarks* given, int64_t begin, int64_t end) {
    const Landmarks& s = *given;
    const int64_t m = s.landmarks_count, L = up(m, PAIR), d = s.d;
    Numbers centres(d * L), bias(L, NONE), tokens(STRIP * d), scores(STRIP * L), numbers(L);
    for (int64_t c = 0; c < L; c++) numbers[c] = c;
    for (int64_t row = begin; row < end; row++) {
        memcpy(bias.data(), s.bias.of(row), m * sizeof(REAL));
        for (int64_t c = 0; c < m; c++)
            for (int64_t j = 0; j < d; j++) centres[j * L + c] = s.landmarks.of(row)[c * s.landmarks.token + j];
        for (int64_t p = 0; p < s.tokens; p += STRIP) {
            copy(s.q, row, p, p + STRIP, s.tokens, d, tokens.data(), d);
            product(tokens.data(), d, centres.data(), L, scores.data(), L, STRIP, d, L);
            REAL lengths[STRIP] = {};
            for (int64_t j = 0; j < d; j++)
                for (int64_t i = 0; i < STRIP; i++) lengths[i] += tokens[i * d + j] * tokens[i * d + j];
            for (int64_t i = 0; i < std::min(STRIP, s.tokens - p); i++) {
                REAL* x = &scores[i * L];
                Vec largest = load(x) + load(bias.data()), last = {};
                for (int64_t c = 0; c < L; c += N) {
                    const Vec here = load(x + c) + load(&bias[c]);
                    store(x + c, here);
                    largest = here > largest ? here : largest;
                }
                const auto more = [](REAL a, REAL b) { return a > b ? a : b; };
                const REAL best = reduce(largest, more), limit = best - (REAL)s.scale * (lengths[i] - best);
                for (int64_t c = 0; c < L; c += N) last = load(x + c) >= limit ? load(&numbers[c]) : last;
                s.out.of(row)[(p + i) * s.out.token] = std::min<REAL>(reduce(last, more), m - 1);
            }
        }
    }
}

struct Inverse {
    Rows a, z, out, grad, of_a, of_z;
    REAL* history;
    int64_t m, steps;
};

extern "C" int64_t padded(int64_t m) { return up(m, PAIR) * (up(m, PAIR) + N); }

// Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 for one matrix, padded to M rows and columns; see `pinv`. The history
// has Z, A Z and the two factors in brackets times A Z, of each step.
struct Iteration {
    const Inverse& s;
    const int64_t m = s.m, M = up(m, PAIR), wide = M + N, size = padded(m);
    Numbers a, room, flipped, last;
    explicit Iteration(const Inverse& s) : s(s), a(size), room(s.history ? 0 : 8 * size), flipped(size), last(size) {}

    REAL* at(int64_t row, int64_t step) {
        if (step == s.steps) return last.data();
        return s.history ? s.history + (row * s.steps + step) * 4 * size : &room[step % 2 * 4 * size];
    }
    void read(const Rows& from, int64_t row, REAL* to) const {
        copy(from, row, 0, m, m, m, to, wide);
        std::fill(to + m * wide, to + size, 0);
    }
    void write(const Rows& to, int64_t row, const REAL* from) const {
        for (int64_t i = 0; i < m; i++) memcpy(to.of(row) + i * to.token, from + i * wide, m * sizeof(REAL));
    }
    // The sums of the sizes in each column, then in each row; the largest of both.
    std::pair<REAL, REAL> norms(Numbers& sums) const {
        std::fill(sums.begin(), sums.end(), 0);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < m; j++) {
                const REAL size = std::abs(a[i * wide + j]);
                sums[j] += size, sums[m + i] += size;
            }
        return {*std::max_element(&sums[0], &sums[m]), *std::max_element(&sums[m], &sums[0] + 2 * m)};
    }
    // Z of the paper: A^T / (|A|_1 |A|_inf)
    void start(REAL* z) const {
        Numbers sums(2 * m);
        const auto [one, infinity] = norms(sums);
        std::fill_n(z, size, 0);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < m; j++) z[j * wide + i] = a[i * wide + j] / (one * infinity);
    }
    // Add to the gradient of A what reaches it by that Z; equal largest sums share theirs.
    void start_backward(const REAL* of_z, REAL* of_a) const {
        Numbers sums(2 * m);
        const auto [one, infinity] = norms(sums);
        REAL product = 0;
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < m; j++) {
                of_a[i * wide + j] += of_z[j * wide + i] / (one * infinity);
                product -= of_z[j * wide + i] * a[i * wide + j] / (one * infinity);
            }
        const REAL of_one = product / one / std::count(&sums[0], &sums[m], one);
        const REAL of_infinity = product / infinity / std::count(&sums[m], &sums[0] + 2 * m, infinity);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < m; j++) {
                const REAL x = a[i * wide + j], both = (sums[j] == one) * of_one + (sums[m + i] == infinity) * of_infinity;
                of_a[i * wide + j] += x > 0 ? both : x < 0 ? -both : 0;
            }
    }
    // to <- factor y + more x
    void combine(REAL* to, REAL more, const REAL* x, REAL factor, const REAL* y) const {
        for (int64_t i = 0; i < M; i++)
            for (int64_t j = i * wide; j < i * wide + M; j += N) store(to + j, load(x + j) * more + load(y + j) * factor);
    }
    // x y, x^T y, x y^T; or that added to what is there.
    template <bool ADD = false>
    void times(const REAL* x, const REAL* y, REAL* to) const { product<false, ADD>(x, wide, y, wide, to, wide, M, m, M); }
    template <bool ADD = false>
    void flipped_times(const REAL* x, const REAL* y, REAL* to) const { product<true, ADD>(x, wide, y, wide, to, wide, M, m, M); }
    template <bool ADD = false>
    void times_flipped(const REAL* x, const REAL* y, REAL* to) {
        for (int64_t i0 = 0; i0 < M; i0 += STRIP)
            for (int64_t j = 0; j < M; j++)
                for (int64_t i = i0; i < i0 + STRIP; i++) flipped[j * wide + i] = y[i * wide + j];
        times<ADD>(x, flipped.data(), to);
    }
};

extern "C" void iterate_forward(const Inverse* given, int64_t begin, int64_t end) {
    Iteration x(*given);
    for (int64_t row = begin; row < end; row++) {
        x.read(given->a, row, x.a.data());
        if (given->z.at) x.read(given->z, row, x.at(row, 0));
        else x.start(x.at(row, 0));
        for (int64_t k = 0; k < given->steps; k++) {
            REAL *z = x.at(row, k), *az = z + x.size, *inner = az + x.size, *outer = inner + x.size, *next = x.at(row, k + 1);
            x.times(x.a.data(), z, az);
            x.times(az, az, inner);
            x.combine(inner, -1, inner, 7, az);
            x.times(az, inner, outer);
            x.combine(outer, -1, outer, 15, az);
            x.times(z, outer, next);
            x.combine(next, -.25, next, 3.25, z);
        }
        x.write(given->out, row, x.last.data());
    }
}

extern "C" void iterate_backward(const Inverse* given, int64_t begin, int64_t end) {
    Iteration x(*given);
    Numbers grad(x.size), of_z(x.size), of_a(x.size), of_az(x.size), less_of_inner(x.size), of_outer(x.size);
    REAL *to_inner = less_of_inner.data(), *to_outer = of_outer.data(), *to_az = of_az.data();
    for (int64_t row = begin; row < end; row++) {
        x.read(given->a, row, x.a.data());
        x.read(given->grad, row, grad.data());
        std::fill(of_a.begin(), of_a.end(), 0);
        for (int64_t k = given->steps - 1; k >= 0; k--) {
            const REAL *z = x.at(row, k), *az = z + x.size, *inner = az + x.size, *outer = inner + x.size;
            x.flipped_times(z, grad.data(), to_outer);
            x.combine(to_outer, -.25, to_outer, 0, to_outer);
            x.flipped_times(az, to_outer, to_inner);
            x.times_flipped(to_outer, inner, to_az);
            x.combine(to_az, -1, to_az, 15, to_outer);
            x.combine(to_az, 1, to_az, -7, to_inner);
            x.times_flipped<true>(to_inner, az, to_az);
            x.flipped_times<true>(az, to_inner, to_az);
            x.times_flipped<true>(to_az, z, of_a.data());
            x.times_flipped(grad.data(), outer, of_z.data());
            x.combine(of_z.data(), -.25, of_z.data(), 3.25, grad.data());
            x.flipped_times<true>(x.a.data(), to_az, of_z.data());
            std::swap(grad, of_z);
        }
        if (given->of_z.at) x.write(given->of_z, row, grad.data());
        else x.start_backward(grad.data(), of_a.data());
        x.write(given->of_a, row, of_a.data());
    }
}

// Rows that are left, for the threads of a call.
struct Left {
    void (*loop)(const void*, int64_t, int64_t);
    const void* arguments;
    const int64_t rows, step;
    std::atomic<int64_t> next{0};
};

static void take(void* shared) {
    Left& left = *(Left*)shared;
    for (int64_t row; (row = left.next.fetch_add(left.step)) < left.rows;)
        left.loop(left.arguments, row, std::min(left.rows, row + left.step));
}

// Call a loop for all rows: by `parallel`, which is GOMP_parallel of the OpenMP that torch has, so that no other threads
// spin beside these; by threads of this call where that is not known.
extern "C" void in_parallel(void (*loop)(const void*, int64_t, int64_t), const void* arguments, int64_t rows, int64_t threads,
                            void (*parallel)(void (*)(void*), void*, unsigned, unsigned)) {
    threads = std::min(threads, rows);
    if (threads < 2) return loop(arguments, 0, rows);
    Left left{loop, arguments, rows, std::max<int64_t>(1, rows / (4 * threads))};
    if (parallel) return parallel(take, &left, (unsigned)threads, 0);
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; i++) others.emplace_back(take, &left);
    take(&left);
    for (auto& other : others) other.join();
}
