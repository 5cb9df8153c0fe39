// near_far as one operator of onnxruntime, `nystrom::NearFar(q, k, v, keep)`, by the loops of native.cpp: `onnx_library`
// compiles that file and this one as one. A thread of onnxruntime takes whole heads.
//
// Below is a declaration of our own of the part of onnxruntime's C interface that this file calls. The interface is a table
// of functions which only grows: the indices are those of OrtApi, and the fields those of OrtCustomOp, in
// onnxruntime_c_api.h, and hold from version 1.17 on, which added KernelContext_ParallelFor.
#include <new>
#include <numeric>
#include <string>

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
constexpr int FLOAT = 1, BOOL = 9, INVALID_ARGUMENT = 2, OF_DEFAULT_MEMORY = 0;

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

// The options of near_far, by their names there.
struct NearFar {
    Api api;
    int64_t block_size, reach, num_heavy, num_clusters, iterations, exact_up_to, num_selected;
    float scale;
};

struct Call {
    const NearFar& options;
    const REAL *q, *k, *v;
    const uint8_t* keep;
    REAL* out;
    int64_t b, h, n, d, e;
    std::atomic<bool> failed{false};
};

// Rows that stand one after the other.
static Rows alone(const REAL* x, int64_t width) { return {(REAL*)x, 0, 0, width, 1}; }

// Exact attention of t tokens.
static void attend_exactly(const REAL* q, const REAL* k, const REAL* v, int64_t t, int64_t d, int64_t e, double scale, REAL* to) {
    const int64_t L = up(t, PAIR), E = up(e, PAIR);
    Numbers keys_t(d * L), values(L * E), bias(L, NONE), queries(STRIP * d), scores(STRIP * L), out(STRIP * E);
    for (int64_t p = 0; p < t; p++) {
        for (int64_t j = 0; j < d; j++) keys_t[j * L + p] = k[p * d + j];
        memcpy(&values[p * E], v + p * e, e * sizeof(REAL));
        bias[p] = 0;
    }
    for (int64_t p = 0; p < t; p += STRIP) {
        const int64_t rows = std::min(STRIP, t - p);
        memcpy(queries.data(), q + p * d, rows * d * sizeof(REAL));
        product(queries.data(), d, keys_t.data(), L, scores.data(), L, STRIP, d, L);
        REAL inverse[STRIP];
        for (int64_t i = 0; i < rows; i++) inverse[i] = softmax(&scores[i * L], bias.data(), scale, L);
        product(scores.data(), L, values.data(), E, out.data(), E, STRIP, t, E);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < e; j++) to[(p + i) * e + j] = out[i * E + j] * inverse[i];
    }
}

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
        means_of(k.data(), m, centres.data());
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
    void means_of(const REAL* x, int64_t segments, REAL* to) const {
        Landmarks s = {};
        s.q = alone(x, d), s.landmarks = alone(to, d), s.tokens = count, s.d = d, s.landmarks_count = segments;
        means_forward(&s, 0, 1);
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
        means_of(q, std::min(QUERY_MEANS, count), means.data());
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

// One head.
static void attend_row(const Call& c, int64_t row) {
    const NearFar& o = c.options;
    const int64_t n = c.n, d = c.d, e = c.e, size = o.block_size, m = o.num_clusters;
    const REAL *q = c.q + row * n * d, *k = c.k + row * n * d, *v = c.v + row * n * e;
    REAL* out = c.out + row * n * e;
    std::vector<int64_t> at;
    for (int64_t p = 0; p < n; p++)
        if (c.keep[row / c.h * n + p]) at.push_back(p);
    const int64_t count = at.size();
    if (count < n) std::fill_n(out, n * e, 0);
    if (!count) return;
    // The real tokens, one after the other; where all are, they stand so already.
    const auto packed = [&](const REAL* x, int64_t width, Numbers& room) {
        if (at[count - 1] - at[0] + 1 == count) return x + at[0] * width;
        room.resize(count * width);
        for (int64_t i = 0; i < count; i++) memcpy(&room[i * width], x + at[i] * width, width * sizeof(REAL));
        return (const REAL*)room.data();
    };
    Numbers room_q, room_k, room_v, result;
    const REAL *few_q = packed(q, d, room_q), *few_k = packed(k, d, room_k);
    const int64_t first = at[0], span = at[count - 1] + 1 - first;
    if (span <= size || count <= std::max({o.num_heavy, m, o.exact_up_to, o.num_selected})) {
        result.resize(count * e);
        attend_exactly(few_q, few_k, packed(v, e, room_v), count, d, e, o.scale, result.data());
        for (int64_t i = 0; i < count; i++) memcpy(out + at[i] * e, &result[i * e], e * sizeof(REAL));
        return;
    }
    Choice choice(o, few_q, few_k, count, d);
    const int64_t t = up(span, size);
    std::vector<int64_t> cluster(t, m);
    for (int64_t i = 0; i < count; i++)
        if (!choice.is_heavy[i]) cluster[at[i] - first] = choice.nearest[i];
    for (int64_t& i : choice.heavy) i = at[i] - first;
    // The tokens from the first real one on, in whole blocks, zeros where they are not real.
    const bool in_place = count == n && t == n;
    const auto moved = [&](const REAL* x, int64_t width, Numbers& room) {
        if (in_place) return x;
        room.assign(t * width, 0);
        for (int64_t p : at) memcpy(&room[(p - first) * width], x + p * width, width * sizeof(REAL));
        return (const REAL*)room.data();
    };
    Blocks s = {};
    s.q = alone(moved(q, d, room_q), d), s.k = alone(moved(k, d, room_k), d), s.v = alone(moved(v, e, room_v), e);
    if (!in_place) result.resize(t * e);
    s.out = alone(in_place ? out : result.data(), e);
    const std::vector<uint8_t> exists(choice.heavy.size(), 1);
    s.heavy = choice.heavy.data(), s.exists = exists.data(), s.cluster = cluster.data();
    s.clusters = m, s.size = size, s.reach = o.reach, s.tokens = t, s.d = d, s.e = e, s.heavies = exists.size(), s.heads = 1;
    s.scale = o.scale;
    std::vector<uint8_t> real(t);
    for (int64_t p : at) real[p - first] = 1;
    std::vector<int64_t> selected(t / size * o.num_selected);
    s.real = real.data(), s.selected = selected.data(), s.selects = o.num_selected;
    if (s.selects) blocks_select(&s, 0, 1);
    blocks_forward(&s, 0, 1);
    if (!in_place)
        for (int64_t p : at) memcpy(out + p * e, &result[(p - first) * e], e * sizeof(REAL));
}

static void attend_row_of(void* shared, size_t row) {
    Call& call = *(Call*)shared;
    try {
        attend_row(call, row);
    } catch (const std::bad_alloc&) {
        call.failed = true;
    }
}

static Status* create(const CustomOp*, void* const* table, const void* info, void** kernel) {
    NearFar o = {{table}};
    const std::pair<const char*, int64_t*> sizes[] = {{"block_size", &o.block_size}, {"reach", &o.reach}, {"num_heavy", &o.num_heavy},
        {"num_clusters", &o.num_clusters}, {"iterations", &o.iterations}, {"exact_up_to", &o.exact_up_to}, {"num_selected", &o.num_selected}};
    for (const auto& [name, to] : sizes) {
        if (Status* wrong = o.api.attribute(info, name, to)) return wrong;
        const bool from_one = to == &o.block_size || to == &o.num_clusters || to == &o.iterations;
        if (*to < from_one || *to > 1 << 24) return o.api.refuse((std::string("nystrom::NearFar: ") + name + " is out of range.").c_str());
    }
    if (Status* wrong = o.api.attribute(info, "scale", &o.scale)) return wrong;
    *kernel = new (std::nothrow) NearFar(o);
    return *kernel ? nullptr : o.api.refuse("nystrom::NearFar: out of memory.");
}

static Status* compute(void* kernel, void* context) {
    const NearFar& o = *(NearFar*)kernel;
    std::vector<int64_t> shapes[4];
    void *data[4], *value = nullptr;
    for (size_t i = 0; i < 4; i++) {
        if (Status* wrong = o.api.input(context, i, &value)) return wrong;
        if (Status* wrong = o.api.shape(value, shapes[i])) return wrong;
        if (Status* wrong = o.api.data(value, &data[i])) return wrong;
    }
    const auto& [q, k, v, keep] = shapes;
    if (q.size() != 4 || k != q || v.size() != 4 || !std::equal(q.begin(), q.end() - 1, v.begin()) || keep != std::vector<int64_t>{q[0], q[2]})
        return o.api.refuse("nystrom::NearFar: expected q, k (b, h, n, d), v (b, h, n, e) and keep (b, n).");
    if (q[2] >= Choice::PLACES) return o.api.refuse("nystrom::NearFar: too many tokens.");
    if (Status* wrong = o.api.output(context, v.data(), 4, &value)) return wrong;
    void* out;
    if (Status* wrong = o.api.data(value, &out)) return wrong;
    if (std::count(q.begin(), q.end(), 0) || !v[3]) {
        std::fill_n((REAL*)out, v[0] * v[1] * v[2] * v[3], 0);
        return nullptr;
    }
    Call call = {o, (REAL*)data[0], (REAL*)data[1], (REAL*)data[2], (uint8_t*)data[3], (REAL*)out, q[0], q[1], q[2], q[3], v[3]};
    if (Status* wrong = o.api.in_parallel(context, attend_row_of, q[0] * q[1], &call)) return wrong;
    return call.failed ? o.api.refuse("nystrom::NearFar: out of memory.") : nullptr;
}

extern "C" Status* RegisterCustomOps(void* options, const OrtApiBase* base) {
    const Api api = {base->GetApi(API_VERSION)};
    // Without a table of functions there is no status; the file then fails to load, by the domain's name.
    if (!api.table) return nullptr;
    static CustomOp op = [] {
        CustomOp op = {};
        op.version = OP_VERSION;
        op.GetName = [](const CustomOp*) { return "NearFar"; };
        op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
        op.GetInputType = [](const CustomOp*, size_t i) { return i == 3 ? BOOL : FLOAT; };
        op.GetInputTypeCount = [](const CustomOp*) -> size_t { return 4; };
        op.GetOutputType = [](const CustomOp*, size_t) { return FLOAT; };
        op.GetOutputTypeCount = [](const CustomOp*) -> size_t { return 1; };
        op.KernelDestroy = [](void* kernel) { delete (NearFar*)kernel; };
        op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const CustomOp*, size_t) { return 0; };
        op.GetInputMemoryType = [](const CustomOp*, size_t) { return OF_DEFAULT_MEMORY; };
        op.CreateKernelV2 = create;
        op.KernelComputeV2 = compute;
        return op;
    }();
    void* domain;
    if (Status* wrong = api.create_domain("nystrom", &domain)) return wrong;
    if (Status* wrong = api.add_operator(domain, &op)) return wrong;
    return api.add_domain(options, domain);
}
