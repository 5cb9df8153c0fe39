// near_far and Nyström attention as one operator of onnxruntime each, by the loops of native.cpp: `onnx_library` compiles
// that file and this one as one. A thread of onnxruntime takes whole heads.
//
// nystrom::NearFar(q, k, v, keep) is self-attention, and nystrom::Nystrom(q, k, v, keep, query_keep[, skip]) either, with the
// kernels (heads, taps) of a convolution of the values. The attributes are options of the methods, by their names there.
//
// Below is a declaration of our own of the part of onnxruntime's C interface that this file calls. The interface is a table
// of functions which only grows: the indices are those of OrtApi, and the fields those of OrtCustomOp, in
// onnxruntime_c_api.h, and hold from version 1.17 on, which added KernelContext_ParallelFor.
#include <exception>
#include <new>
#include <numeric>
#include <string>
#include <utility>

extern "C" {
struct Status;
struct OrtApiBase {
    void* const* (*GetApi)(uint32_t version);
    const char* (*GetVersionString)();
};
struct CustomOp {
    uint32_t version;
    void* CreateKernel;
    const char* (*GetName)(const CustomOp*);
    const char* (*GetExecutionProviderType)(const CustomOp*);
    int (*GetInputType)(const CustomOp*, size_t);
    size_t (*GetInputTypeCount)(const CustomOp*);
    int (*GetOutputType)(const CustomOp*, size_t);
    size_t (*GetOutputTypeCount)(const CustomOp*);
    void* KernelCompute;
    void (*KernelDestroy)(void*);
    int (*GetInputCharacteristic)(const CustomOp*, size_t);
    int (*GetOutputCharacteristic)(const CustomOp*, size_t);
    int (*GetInputMemoryType)(const CustomOp*, size_t);
    int (*GetVariadicInputMinArity)(const CustomOp*);
    int (*GetVariadicInputHomogeneity)(const CustomOp*);
    int (*GetVariadicOutputMinArity)(const CustomOp*);
    int (*GetVariadicOutputHomogeneity)(const CustomOp*);
    Status* (*CreateKernelV2)(const CustomOp*, void* const* api, const void* info, void** kernel);
    Status* (*KernelComputeV2)(void* kernel, void* context);
};
}
constexpr uint32_t API_VERSION = 17, OP_VERSION = 16;
constexpr int FLOAT = 1, BOOL = 9, INVALID_ARGUMENT = 2, OF_DEFAULT_MEMORY = 0, REQUIRED = 0, OPTIONAL = 1;

// The functions of onnxruntime; a status is null where all went well.
struct Api {
    void* const* table;
    template <class Result = Status*, class... Arguments>
    Result call(int index, Arguments... arguments) const {
        return ((Result(*)(Arguments...))table[index])(arguments...);
    }
    Status* refuse(const char* why) const { return call(0, INVALID_ARGUMENT, why); }
    Status* create_domain(const char* name, void** domain) const { return call(26, name, domain); }
    Status* add_operator(void* domain, const CustomOp* op) const { return call(27, domain, op); }
    Status* add_domain(void* options, void* domain) const { return call(28, options, domain); }
    Status* data(void* value, void** at) const { return call(51, value, at); }
    Status* attribute(const void* info, const char* name, float* to) const { return call(85, info, name, to); }
    Status* attribute(const void* info, const char* name, int64_t* to) const { return call(86, info, name, to); }
    Status* input(const void* context, size_t i, void** value) const { return call(90, context, i, value); }
    Status* output(void* context, const int64_t* shape, size_t axes, void** value) const {
        return call(91, context, (size_t)0, shape, axes, value);
    }
    Status* in_parallel(const void* context, void (*work)(void*, size_t), size_t rows, void* shared) const {
        return call(274, context, work, rows, (size_t)0, shared);
    }
    Status* shape(const void* value, std::vector<int64_t>& to) const {
        void* info = nullptr;
        size_t axes = 0;
        if (Status* wrong = call(65, value, &info)) return wrong;
        Status* wrong = call(61, (const void*)info, &axes);
        to.resize(axes);
        if (!wrong) wrong = call(62, (const void*)info, to.data(), axes);
        call<void>(99, info);
        return wrong;
    }
};

// The inputs of an operator, of q (b, h, n, d), k (b, h, s, d) and v (b, h, s, e), and its output.
struct Call {
    const REAL *q, *k, *v, *skip;
    const uint8_t *keep, *query_keep;
    REAL* out;
    int64_t b, h, n, s, d, e, taps, step;
    Numbers sums;
    std::atomic<bool> failed{false};
};

// A whole number among the attributes of an operator.
struct Size {
    const char* name;
    int64_t *to, least, most = 1 << 24;
};

// Rows that stand one after the other.
static Rows alone(const REAL* x, int64_t width) { return {(REAL*)x, 0, 0, width, 1}; }

// The places of the real tokens among n.
struct Real {
    std::vector<int64_t> at;
    int64_t count, first = 0, span = 0;
    Real(const uint8_t* keep, int64_t n) {
        for (int64_t p = 0; p < n; p++)
            if (keep[p]) at.push_back(p);
        count = at.size();
        if (count) first = at[0], span = at[count - 1] + 1 - first;
    }
    // The real tokens, one after the other; copied unless they stand so.
    const REAL* packed(const REAL* x, int64_t width, Numbers& room) const {
        if (span == count) return x + first * width;
        room.resize(count * width);
        for (int64_t i = 0; i < count; i++) memcpy(&room[i * width], x + at[i] * width, width * sizeof(REAL));
        return room.data();
    }
    // The t tokens from the first real one on, zeros where they are not real; copied unless all are.
    const REAL* from_first(const REAL* x, int64_t width, int64_t t, Numbers& room) const {
        if (t == count) return x + first * width;
        room.assign(t * width, 0);
        for (int64_t p : at) memcpy(&room[(p - first) * width], x + p * width, width * sizeof(REAL));
        return room.data();
    }
    // Memory for the results of these tokens: that of the output itself, or room, of which `put` takes the real ones.
    REAL* results(REAL* out, int64_t width, int64_t t, Numbers& room) const {
        if (t == count) return out + first * width;
        room.resize(t * width);
        return room.data();
    }
    void put(const REAL* from, REAL* out, int64_t width, int64_t t) const {
        for (int64_t i = 0; t != count && i < count; i++) memcpy(out + at[i] * width, from + (at[i] - first) * width, width * sizeof(REAL));
    }
};

// Exact attention of n queries to s keys.
static void attend_exactly(const REAL* q, int64_t n, const REAL* k, const REAL* v, int64_t s, int64_t d, int64_t e, double scale, REAL* to) {
    const int64_t L = up(s, PAIR), E = up(e, PAIR);
    Numbers keys_t(d * L), values(L * E), bias(L, NONE), queries(STRIP * d), scores(STRIP * L), out(STRIP * E);
    for (int64_t p = 0; p < s; p++) {
        for (int64_t j = 0; j < d; j++) keys_t[j * L + p] = k[p * d + j];
        memcpy(&values[p * E], v + p * e, e * sizeof(REAL));
        bias[p] = 0;
    }
    for (int64_t p = 0; p < n; p += STRIP) {
        const int64_t rows = std::min(STRIP, n - p);
        // First the scale: a score may pass the largest number without it.
        for (int64_t i = 0; i < rows * d; i++) queries[i] = (REAL)scale * q[p * d + i];
        product(queries.data(), d, keys_t.data(), L, scores.data(), L, STRIP, d, L);
        REAL inverse[STRIP];
        for (int64_t i = 0; i < rows; i++) inverse[i] = softmax(&scores[i * L], bias.data(), 1, L);
        product(scores.data(), L, values.data(), E, out.data(), E, STRIP, s, E);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < e; j++) to[(p + i) * e + j] = out[i * E + j] * inverse[i];
    }
}

// The means of near-equal segments of tokens.
static void means_of(const REAL* x, int64_t tokens, int64_t d, int64_t segments, REAL* to) {
    Landmarks s = {};
    s.q = alone(x, d), s.landmarks = alone(to, d), s.tokens = tokens, s.d = d, s.landmarks_count = segments;
    means_forward(&s, 0, 1);
}

struct NearFar {
    static constexpr const char* NAME = "NearFar";
    static constexpr size_t INPUTS = 4;
    static constexpr int64_t STEPS = 1;
    int64_t block_size, reach, num_heavy, num_clusters, iterations, exact_up_to, num_selected;
    float scale;
    std::vector<Size> sizes() {
        return {{"block_size", &block_size, 1}, {"reach", &reach, 0}, {"num_heavy", &num_heavy, 0}, {"num_clusters", &num_clusters, 1},
                {"iterations", &iterations, 1}, {"exact_up_to", &exact_up_to, 0}, {"num_selected", &num_selected, 0}};
    }
    void attend(Call& c, int64_t row) const;
};

// The choice of heavy keys and clusters among the real tokens of a head, see `nystrom.attention.parts.clusters`.
struct Choice {
    static constexpr int64_t QUERY_MEANS = 8, MIDDLE_TOKENS = 8, ROUNDINGS = 16, PLACES = 1 << 30;
    const NearFar& o;
    const int64_t d, count, m = o.num_clusters;
    Numbers k, centres, nearest;  // Keys less their middle
    std::vector<int64_t> heavy;
    std::vector<uint8_t> is_heavy;

    Choice(const NearFar& o, const REAL* q, const REAL* keys, int64_t count, int64_t d)
        : o(o), d(d), count(count), k(up(count, STRIP) * d), centres(m * d), nearest(count), is_heavy(count) {
        for (int64_t j = 0; j < d; j++) {
            const REAL middle = middle_of(keys, j);
            for (int64_t p = 0; p < count; p++) k[p * d + j] = keys[p * d + j] - middle;
        }
        choose_heavy(q);
        means_of(k.data(), count, d, m, centres.data());
        Numbers sample, sums;
        std::vector<int64_t> number(m);
        const int64_t moves = o.iterations - 1, size = std::min(count, std::min(std::max((count + 3) / 4, m), 8 * m));
        for (int64_t step = 0; step < moves; step++) {
            sample.resize(size * d), sums.assign(m * d, 0), std::fill(number.begin(), number.end(), 0);
            const auto at = [&](int64_t i) { return (i * moves + step) * count / (size * moves); };
            for (int64_t i = 0; i < size; i++) memcpy(&sample[i * d], &k[at(i) * d], d * sizeof(REAL));
            assign(sample.data(), size);
            for (int64_t i = 0; i < size; i++) {
                if (is_heavy[at(i)]) continue;
                const int64_t c = nearest[i];
                number[c] += 1, add(&sums[c * d], &sample[i * d], d);
            }
            for (int64_t c = 0; c < m; c++)
                for (int64_t j = 0; number[c] && j < d; j++) centres[c * d + j] = sums[c * d + j] / number[c];
        }
        assign(k.data(), count);
    }

    REAL middle_of(const REAL* keys, int64_t j) const {
        REAL some[MIDDLE_TOKENS];
        for (int64_t i = 0; i < MIDDLE_TOKENS; i++) some[i] = keys[i * count / MIDDLE_TOKENS * d + j];
        std::sort(some, some + MIDDLE_TOKENS);
        const REAL low = some[MIDDLE_TOKENS / 2 - 1], high = some[MIDDLE_TOKENS / 2];
        const REAL bound = std::pow((double)std::numeric_limits<REAL>::max(), 1. / 6) / 8;
        return std::min(std::max(std::abs(low) < std::abs(high) ? low : high, -bound), bound);
    }
    void assign(const REAL* x, int64_t tokens) {
        Numbers bias(m);
        for (int64_t c = 0; c < m; c++)
            bias[c] = -.5 * std::inner_product(&centres[c * d], &centres[c * d] + d, &centres[c * d], (REAL)0);
        Landmarks s = {};
        s.q = alone(x, d), s.landmarks = alone(centres.data(), d), s.bias = alone(bias.data(), 1), s.out = alone(nearest.data(), 1);
        s.tokens = tokens, s.d = d, s.e = 1, s.landmarks_count = m;
        s.scale = ROUNDINGS * std::numeric_limits<REAL>::epsilon();
        nearest_forward(&s, 0, 1);
    }
    // The keys that receive most attention from means of the queries; of nearly equal ones the first.
    void choose_heavy(const REAL* q) {
        const int64_t Q = up(QUERY_MEANS, PAIR), rows = up(count, STRIP);
        Numbers means(QUERY_MEANS * d), means_t(d * Q), scores(rows * Q), top(Q, NONE), sum(Q);
        means_of(q, count, d, std::min(QUERY_MEANS, count), means.data());
        for (int64_t i = 0; i < QUERY_MEANS; i++)
            for (int64_t j = 0; j < d; j++) means_t[j * Q + i] = o.scale * means[i * d + j];
        product(k.data(), d, means_t.data(), Q, scores.data(), Q, rows, d, Q);
        for (int64_t p = 0; p < count; p++)
            for (int64_t i = 0; i < Q; i++) top[i] = std::max(top[i], scores[p * Q + i]);
        for (int64_t p = 0; p < count; p++)
            for (int64_t i = 0; i < Q; i += N) store(&sum[i], load(&sum[i]) + exp_of(load(&scores[p * Q + i]) - load(&top[i])));
        // Columns behind the means take no part.
        for (int64_t i = 0; i < Q; i++) sum[i] = i < QUERY_MEANS ? top[i] + std::log(sum[i]) : -NONE;
        std::vector<int64_t> order(count);
        for (int64_t p = 0; p < count; p++) {
            REAL most = NONE, all = 0, *x = &scores[p * Q];
            for (int64_t i = 0; i < Q; i++) x[i] -= sum[i], most = std::max(most, x[i]);
            for (int64_t i = 0; i < Q; i += N) all += reduce(exp_of(load(x + i) - most), std::plus<REAL>());
            const REAL weight = most + std::log(all), bounded = weight > -4194304 ? weight < 4194304 ? weight : (REAL)4194304 : (REAL)-4194304;
            order[p] = (int64_t)std::nearbyint(bounded * 1024) * PLACES + PLACES - 1 - p;
        }
        const int64_t g = std::min(o.num_heavy, count);
        std::partial_sort(order.begin(), order.begin() + g, order.end(), std::greater<int64_t>());
        for (int64_t i = 0; i < g; i++) heavy.push_back(PLACES - 1 - (order[i] & (PLACES - 1))), is_heavy[heavy[i]] = 1;
    }
};

void NearFar::attend(Call& c, int64_t row) const {
    const int64_t n = c.n, d = c.d, e = c.e, m = num_clusters;
    const REAL *q = c.q + row * n * d, *k = c.k + row * n * d, *v = c.v + row * n * e;
    REAL* out = c.out + row * n * e;
    const Real real(c.keep + row / c.h * n, n);
    if (real.count < n) std::fill_n(out, n * e, 0);
    if (!real.count) return;
    Numbers room_q, room_k, room_v, room;
    if (real.span <= block_size || real.count <= std::max({num_heavy, m, exact_up_to, num_selected})) {
        const REAL *few_k = real.packed(k, d, room_k), *few_v = real.packed(v, e, room_v);
        REAL* results = real.results(out, e, real.span, room);
        attend_exactly(real.from_first(q, d, real.span, room_q), real.span, few_k, few_v, real.count, d, e, scale, results);
        return real.put(results, out, e, real.span);
    }
    Choice choice(*this, real.packed(q, d, room_q), real.packed(k, d, room_k), real.count, d);
    const int64_t t = up(real.span, block_size);
    std::vector<int64_t> cluster(t, m);
    for (int64_t i = 0; i < real.count; i++)
        if (!choice.is_heavy[i]) cluster[real.at[i] - real.first] = choice.nearest[i];
    for (int64_t& i : choice.heavy) i = real.at[i] - real.first;
    Blocks s = {};
    s.q = alone(real.from_first(q, d, t, room_q), d), s.k = alone(real.from_first(k, d, t, room_k), d);
    s.v = alone(real.from_first(v, e, t, room_v), e), s.out = alone(real.results(out, e, t, room), e);
    const std::vector<uint8_t> exists(choice.heavy.size(), 1);
    s.heavy = choice.heavy.data(), s.exists = exists.data(), s.cluster = cluster.data();
    s.clusters = m, s.size = block_size, s.reach = reach, s.tokens = t, s.d = d, s.e = e, s.heavies = exists.size(), s.heads = 1;
    s.scale = scale;
    std::vector<uint8_t> is_real(t);
    for (int64_t p : real.at) is_real[p - real.first] = 1;
    std::vector<int64_t> selected(t / block_size * num_selected);
    s.real = is_real.data(), s.selected = selected.data(), s.selects = num_selected;
    if (s.selects) blocks_select(&s, 0, 1);
    blocks_forward(&s, 0, 1);
    real.put(s.out.at, out, e, t);
}

// See `nystrom.attention.methods.nystrom`.
struct Nystrom {
    static constexpr const char* NAME = "Nystrom";
    static constexpr size_t INPUTS = 6;
    // The first step is for a start of the inverse that depends on other heads.
    static constexpr int64_t STEPS = 2, PAPER = 0, AUTHORS = 1, SEQUENCE = 2;
    int64_t num_landmarks, pinv_steps, z0;
    float scale;
    std::vector<Size> sizes() {
        return {{"num_landmarks", &num_landmarks, 1}, {"pinv_steps", &pinv_steps, 0}, {"z0", &z0, PAPER, SEQUENCE}};
    }
    void attend(Call& c, int64_t row) const;

    // softmax(scale q landmarks^T) middle, as far as these are given, and what else is.
    void attend_to_landmarks(Landmarks s, const REAL* q, int64_t tokens, int64_t d, int64_t e, REAL* to) const {
        s.q = alone(q, d), s.out = alone(to, e), s.tokens = tokens, s.d = d, s.e = e, s.scale = scale;
        landmarks_forward(&s, 0, 1);
    }
    // The softmax matrix of the landmarks.
    Numbers matrix(const Numbers& q_means, const Numbers& k_means, int64_t d) const {
        const int64_t m = num_landmarks;
        Numbers units(m * m), a(m * m);
        for (int64_t i = 0; i < m; i++) units[i * m + i] = 1;
        Landmarks s = {};
        s.landmarks = alone(k_means.data(), d), s.middle = alone(units.data(), m), s.landmarks_count = m;
        attend_to_landmarks(s, q_means.data(), m, d, m, a.data());
        return a;
    }
    REAL largest_sum(const Numbers& a) const {
        Numbers sums(num_landmarks);
        for (int64_t i = 0; i < num_landmarks; i++) add(sums.data(), &a[i * num_landmarks], num_landmarks);
        return *std::max_element(sums.begin(), sums.end());
    }
    Numbers inverse(const Numbers& a, const Call& c, int64_t row) const {
        const int64_t m = num_landmarks, first = z0 == SEQUENCE ? row / c.h * c.h : 0, last = z0 == SEQUENCE ? first + c.h : c.b * c.h;
        Numbers z(z0 == PAPER ? 0 : m * m), out(m * m);
        Inverse s = {};
        if (z0 != PAPER) {
            const REAL largest = *std::max_element(&c.sums[first], &c.sums[0] + last);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < m; j++) z[j * m + i] = a[i * m + j] / largest;
            s.z = alone(z.data(), m);
        }
        s.a = alone(a.data(), m), s.out = alone(out.data(), m), s.m = m, s.steps = pinv_steps;
        iterate_forward(&s, 0, 1);
        return out;
    }
    // The inverse times the landmarks' attention to the keys.
    Numbers middle(const Numbers& inverse, const Numbers& q_means, const REAL* k, const REAL* v, int64_t tokens, int64_t d, int64_t e) const {
        const int64_t m = num_landmarks;
        Numbers right(m * e), sums(m), middle(m * e);
        Landmarks s = {};
        s.q = alone(k, d), s.landmarks = alone(q_means.data(), d), s.v = alone(v, e), s.out = alone(right.data(), e);
        s.sums = alone(sums.data(), 1), s.tokens = tokens, s.d = d, s.e = e, s.landmarks_count = m, s.scale = scale;
        tokens_forward(&s, 0, 1);
        for (int64_t i = 0; i < m; i++)
            for (int64_t c = 0; c < m; c++) add(&middle[i * e], &right[c * e], e, inverse[i * m + c]);
        return middle;
    }
};

void Nystrom::attend(Call& c, int64_t row) const {
    const int64_t n = c.n, d = c.d, e = c.e, m = num_landmarks;
    const Real queries(c.query_keep + row / c.h * n, n), keys(c.keep + row / c.h * c.s, c.s);
    const bool exact = std::min(queries.count, keys.count) <= m;
    if (c.step == 0 && (exact || z0 == PAPER)) return;
    REAL* out = c.out + row * n * e;
    if (c.step == 1 && (queries.count < n || !keys.count)) std::fill_n(out, n * e, 0);
    if (!queries.count || !keys.count) return;
    const REAL *q = c.q + row * n * d, *v = c.v + row * c.s * e;
    Numbers room_q, room_k, room_v, room, packed_q, q_means(exact ? 0 : m * d), k_means(exact ? 0 : m * d), a, of_landmarks;
    const REAL *real_k = keys.packed(c.k + row * c.s * d, d, room_k);
    if (!exact) {
        means_of(queries.packed(q, d, packed_q), queries.count, d, m, q_means.data());
        means_of(real_k, keys.count, d, m, k_means.data());
        a = matrix(q_means, k_means, d);
    }
    if (c.step == 0) {
        c.sums[row] = largest_sum(a);
        return;
    }
    const int64_t t = queries.span;
    const REAL *first_q = queries.from_first(q, d, t, room_q), *real_v = keys.packed(v, e, room_v);
    REAL* results = queries.results(out, e, t, room);
    Landmarks s = {};
    if (exact) {
        attend_exactly(first_q, t, real_k, real_v, keys.count, d, e, scale, results);
        s.to = alone(results, e);
    } else {
        of_landmarks = middle(inverse(a, c, row), q_means, real_k, real_v, keys.count, d, e);
        s.landmarks = alone(k_means.data(), d), s.middle = alone(of_landmarks.data(), e), s.landmarks_count = m;
    }
    Numbers room_skip;
    if (c.skip) s.v = alone(queries.from_first(v, e, t, room_skip), e), s.w = alone(c.skip + row % c.h * c.taps, 1), s.taps = c.taps;
    if (c.skip || !exact) attend_to_landmarks(s, first_q, t, d, e, results);
    queries.put(results, out, e, t);
}

// An operator in a session.
template <class Method>
struct Kernel {
    Api api;
    Method method;
    Status* refuse(const std::string& why) const { return api.refuse(("nystrom::" + std::string(Method::NAME) + ": " + why).c_str()); }
};

template <class Method>
static Status* create(const CustomOp*, void* const* table, const void* info, void** kernel) {
    Kernel<Method> made = {{table}, {}};
    for (const Size& size : made.method.sizes()) {
        if (Status* wrong = made.api.attribute(info, size.name, size.to)) return wrong;
        if (*size.to < size.least || *size.to > size.most) return made.refuse(std::string(size.name) + " is out of range.");
    }
    if (Status* wrong = made.api.attribute(info, "scale", &made.method.scale)) return wrong;
    *kernel = new (std::nothrow) Kernel<Method>(made);
    return *kernel ? nullptr : made.refuse("out of memory.");
}

template <class Method>
static Status* compute(void* kernel, void* context) {
    const auto& made = *(Kernel<Method>*)kernel;
    const Api& api = made.api;
    std::vector<int64_t> shapes[6];
    void *data[6] = {}, *value = nullptr, *out;
    for (size_t i = 0; i < Method::INPUTS; i++) {
        if (Status* wrong = api.input(context, i, &value)) return wrong;
        if (!value) continue;  // The last may be left out
        if (Status* wrong = api.shape(value, shapes[i])) return wrong;
        if (Status* wrong = api.data(value, &data[i])) return wrong;
    }
    if (Method::INPUTS == 4) shapes[4] = shapes[3], data[4] = data[3];
    const auto& [q, k, v, keep, query_keep, skip] = shapes;
    typedef std::vector<int64_t> Shape;
    if (q.size() != 4 || k.size() != 4 || v.size() != 4 || k != Shape{q[0], q[1], k[2], q[3]} || v != Shape{q[0], q[1], k[2], v[3]} ||
        keep != Shape{q[0], k[2]} || query_keep != Shape{q[0], q[2]} || (data[5] && (skip.size() != 2 || skip != Shape{q[1], skip[1]} || q[2] != k[2])))
        return made.refuse(Method::INPUTS == 4 ? "expected q, k (b, h, n, d), v (b, h, n, e) and keep (b, n)."
                                               : "expected q (b, h, n, d), k (b, h, s, d), v (b, h, s, e), keep (b, s), query_keep (b, n) and, where n is s, skip (h, taps).");
    if (q[2] >= Choice::PLACES) return made.refuse("too many tokens.");
    const int64_t shape[] = {q[0], q[1], q[2], v[3]};
    if (Status* wrong = api.output(context, shape, 4, &value)) return wrong;
    if (Status* wrong = api.data(value, &out)) return wrong;
    Call c = {(REAL*)data[0], (REAL*)data[1], (REAL*)data[2], (REAL*)data[5], (uint8_t*)data[3], (uint8_t*)data[4], (REAL*)out,
              q[0], q[1], q[2], k[2], q[3], v[3], data[5] ? skip[1] : 0, 0, {}};
    if (!(c.b && c.h && c.n && c.s && c.d && c.e)) {
        std::fill_n((REAL*)out, c.b * c.h * c.n * c.e, 0);
        return nullptr;
    }
    c.sums.assign(c.b * c.h, 0);
    std::pair<const Method&, Call&> shared(made.method, c);
    const auto attend = [](void* shared, size_t row) {
        auto& [method, c] = *(std::pair<const Method&, Call&>*)shared;
        try {
            method.attend(c, row);
        } catch (const std::exception&) {
            c.failed = true;
        }
    };
    for (; c.step < Method::STEPS; c.step++)
        if (Status* wrong = api.in_parallel(context, attend, c.b * c.h, &shared)) return wrong;
    return c.failed ? made.refuse("out of memory.") : nullptr;
}

template <class Method>
static const CustomOp* operator_of() {
    static CustomOp op = [] {
        CustomOp op = {};
        op.version = OP_VERSION;
        op.GetName = [](const CustomOp*) { return Method::NAME; };
        op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
        op.GetInputType = [](const CustomOp*, size_t i) { return i == 3 || i == 4 ? BOOL : FLOAT; };
        op.GetInputTypeCount = [](const CustomOp*) { return Method::INPUTS; };
        op.GetOutputType = [](const CustomOp*, size_t) { return FLOAT; };
        op.GetOutputTypeCount = [](const CustomOp*) -> size_t { return 1; };
        op.KernelDestroy = [](void* kernel) { delete (Kernel<Method>*)kernel; };
        op.GetInputCharacteristic = [](const CustomOp*, size_t i) { return i == 5 ? OPTIONAL : REQUIRED; };
        op.GetOutputCharacteristic = [](const CustomOp*, size_t) { return REQUIRED; };
        op.GetInputMemoryType = [](const CustomOp*, size_t) { return OF_DEFAULT_MEMORY; };
        op.CreateKernelV2 = create<Method>;
        op.KernelComputeV2 = compute<Method>;
        return op;
    }();
    return &op;
}

extern "C" Status* RegisterCustomOps(void* options, const OrtApiBase* base) {
    const Api api = {base->GetApi(API_VERSION)};
    // Without a table of functions there is no status; the file then fails to load, by the domain's name.
    if (!api.table) return nullptr;
    void* domain;
    if (Status* wrong = api.create_domain("nystrom", &domain)) return wrong;
    for (const CustomOp* op : {operator_of<NearFar>(), operator_of<Nystrom>()})
        if (Status* wrong = api.add_operator(domain, op)) return wrong;
    return api.add_domain(options, domain);
}
