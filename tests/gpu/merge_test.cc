// The merge of partial results that lie on a GPU: as the host's, and as a forward pass that was
// never split.
#include <cmath>
#include <memory>

#include "backend/cuda/device.h"
#include "fovea/c_api.h"
#include "harness/device_tensors.h"
#include "harness/random.h"
#include "stream.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::merging {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::DeviceTensors;

class DeviceMerge : public EngineTest {};

constexpr const char* kDTypes[] = {"bf16", "f16", "f32"};
constexpr int64_t kOneLaunch = 32;  // parts; more are joined in turns
constexpr double kLargest = 4;      // about what normal numbers reach

// A result of a case, on the host and on the device.
struct Part {
  explicit Part(const Case& c) : host(c), there(host, 0) {}

  PartialResult on_host() const { return {host.forward().out, host.forward().lse}; }
  PartialResult on_device() const { return {there.forward().out, there.forward().lse}; }

  CaseTensors host;
  DeviceTensors there;
};
using Parts = std::vector<std::unique_ptr<Part>>;

Part& add_part(Parts& parts, const Case& c) {
  return *parts.emplace_back(std::make_unique<Part>(c));
}

void fill_normal(const TensorView& t, uint64_t seed, double factor) {
  uint64_t n = harness::hash64(seed);
  std::array<int64_t, 4> size{1, 1, 1, 1};
  for (int i = 0; i < t.rank; ++i) size[static_cast<size_t>(i)] = t.sizes[static_cast<size_t>(i)];
  for (int64_t a = 0; a < size[0]; ++a)
    for (int64_t b = 0; b < size[1]; ++b)
      for (int64_t c = 0; c < size[2]; ++c)
        for (int64_t d = 0; d < size[3]; ++d) {
          harness::write_element(t, factor * harness::normal(harness::hash64(++n)), a, b, c, d);
        }
}

// One row of (batch, row, head), packed results having no batch.
TensorView row_of(const TensorView& out, int64_t b, int64_t i, int64_t h) {
  if (out.rank == 3) return slice(slice(out, 0, i, i + 1), 1, h, h + 1);
  return slice(slice(slice(out, 0, b, b + 1), 1, i, i + 1), 2, h, h + 1);
}

void set_lse(const TensorView& lse, double value, int64_t b, int64_t i, int64_t h) {
  if (lse.rank == 2) return harness::write_element(lse, value, h, i);
  harness::write_element(lse, value, b, h, i);
}

// Random results; of row 0 only the last part saw a key, of row 1 none did, rows 2 to 4 meet NaN
// and Inf.
Parts random_parts(const Case& c, int64_t count) {
  Parts parts;
  for (int64_t n = 0; n < count; ++n) {
    Part& part = add_part(parts, c);
    const auto [out, lse] = part.on_host();
    fill_normal(out, 2 * static_cast<uint64_t>(n) + 1, 1);
    fill_normal(lse, 2 * static_cast<uint64_t>(n) + 2, 3);
    for (const int64_t row : {0, 1}) {
      if (row == 0 && n + 1 == count) continue;
      set_lse(lse, -INFINITY, 0, row, 0);
      fill_values(row_of(out, 0, row, 0), NAN);  // must not matter
    }
    if (n == count / 2) {
      set_lse(lse, NAN, 0, 2, 0);
      set_lse(lse, INFINITY, 0, 3, 0);
      fill_values(row_of(out, 0, 4, 0), NAN);
    }
  }
  return parts;
}

void expect_ok(const Status& s) { EXPECT_TRUE(s.ok()) << s.message(); }

void upload(const Parts& parts) {
  for (const auto& part : parts) expect_ok(part->there.upload());
}

std::vector<PartialResult> views(const Parts& parts,
                                 PartialResult (Part::*where)() const = &Part::on_device) {
  std::vector<PartialResult> all;
  for (const auto& part : parts) all.push_back((*part.*where)());
  return all;
}

Status merge_into(const std::vector<PartialResult>& parts, const PartialResult& to,
                  Stream stream = {}) {
  return merge(parts.data(), static_cast<int64_t>(parts.size()), to.out, to.lse, stream);
}

double ulp_of(DType dtype) {
  return dtype == DType::kBf16 ? 0x1p-7 : dtype == DType::kF16 ? 0x1p-10 : 0x1p-23;
}

void expect_near(const TensorView& found, const TensorView& expected, double relative,
                 double absolute, const std::string& why) {
  const std::vector<double> a = values_of(found), b = values_of(expected);
  for (size_t n = 0; n < a.size(); ++n) {
    if (std::isnan(a[n]) && std::isnan(b[n])) continue;
    if (a[n] == b[n]) continue;  // two equal infinities among them
    ASSERT_LE(std::abs(a[n] - b[n]), relative * std::abs(b[n]) + absolute)
        << "element " << n << ": " << a[n] << ", the host says " << b[n] << "; " << why;
  }
}

// Sums are f32 here and f64 on the host: one launch may round the other way, each further one is a
// rounding of a result that may have been larger than the last.
void expect_as_host(const Part& found, const Part& expected, int64_t count,
                    const std::string& why) {
  const double ulp = ulp_of(expected.on_host().out.dtype);
  const auto more = static_cast<double>((count - 1) / kOneLaunch);
  expect_near(found.on_host().out, expected.on_host().out, ulp, 4e-6 + more * ulp * kLargest, why);
  expect_near(found.on_host().lse, expected.on_host().lse, 2e-6, (1 + more) * 2e-6, why);
  EXPECT_TRUE(found.host.canaries_intact()) << why;
}

TEST_F(DeviceMerge, IsTheHosts) {
  for (const char* dtype : {"bf16", "f16", "f32", "f64"}) {
    for (const char* layout : {"d=64", "d=128 order=bshd", "d=70 pad=3", "d=7 order=bshd pad=1",
                               "d=300", "d=1", "d=64 varlen", "d=20 varlen pad=4 order=bshd"}) {
      const Case c =
          must_parse("b=2 hq=3 q=6 kv=1 " + std::string(layout) + " dtype=" + std::string(dtype));
      for (const int64_t count : {1, 2, 3, 32, 33, 100}) {
        if (count == 100 && c.problem.dim_v != 64) continue;  // memory of parts is what takes time
        const std::string why = std::to_string(count) + " parts of " + harness::format_case(c);
        const Parts parts = random_parts(c, count);
        Part expected(c), found(c);
        expect_ok(merge_into(views(parts, &Part::on_host), expected.on_host()));
        upload(parts);
        expect_ok(found.there.upload());
        expect_ok(merge_into(views(parts), found.on_device()));
        expect_ok(found.there.download());
        expect_as_host(found, expected, count, why);
        if (HasFatalFailure()) return;
        if (count > 1) continue;
        EXPECT_EQ(values_of(row_of(found.on_host().out, 0, 0, 0)),
                  values_of(row_of(parts[0]->on_host().out, 0, 0, 0)))
            << "one part is itself; " << why;
      }
    }
  }
}

// The result takes the place of a part, also of one that a first launch would leave for later.
TEST_F(DeviceMerge, OutMayBeAPartsOwn) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse("b=2 hq=3 q=6 kv=1 d=64 dtype=" + std::string(dtype));
    for (const auto& [count, into] : {std::pair(2, 0), std::pair(2, 1), std::pair(70, 69)}) {
      const std::string why = std::to_string(count) + " parts into " + std::to_string(into);
      const Parts parts = random_parts(c, count);
      Part expected(c);
      expect_ok(merge_into(views(parts, &Part::on_host), expected.on_host()));
      upload(parts);
      Part& target = *parts[static_cast<size_t>(into)];
      expect_ok(merge_into(views(parts), target.on_device()));
      expect_ok(target.there.download());
      expect_as_host(target, expected, count, why);
    }
  }
}

// 5 and 17: keys split, attended to apart and merged give the whole, and its gradients, under the
// rule that holds for the whole.
TEST_F(DeviceMerge, SplitKeysAreTheWhole) {
  const Engine engine = fast_engines().front();
  for (const char* dtype : kDTypes) {
    for (const char* shape : {"b=2 hq=4 hkv=2 q=45 kv=300 d=64", "b=1 hq=8 hkv=1 q=3 kv=300 d=128",
                              "b=1 hq=2 q=130 kv=300 d=80 data=spiky order=bshd"}) {
      const Case c = must_parse(std::string(shape) + " pass=fwd,bwd dtype=" + dtype);
      Part whole(c);
      Parts parts;
      int64_t begin = 0;
      for (const int64_t end : {1, 100, 300}) {
        Case piece = c;
        piece.problem.kv_len = end - begin;
        CaseTensors& part = add_part(parts, piece).host;
        copy_values(whole.host.forward().q, part.forward().q);
        copy_values(slice(whole.host.forward().k, 1, begin, end), part.forward().k);
        copy_values(slice(whole.host.forward().v, 1, begin, end), part.forward().v);
        piece.backward = false;
        part.accept_inputs();
        run(engine, piece, part);
        begin = end;
      }
      upload(parts);
      expect_ok(whole.there.upload());
      expect_ok(merge_into(views(parts), whole.on_device()));
      expect_ok(whole.there.download());
      const Plan plan = plan_on(engine, c.problem);
      expect_ok(calls_on(engine, plan, whole.host).backward());
      for (const harness::Accuracy& a :
           harness::compare_with_oracle(c, whole.host, true, true, harness::kDefaultCost)) {
        EXPECT_TRUE(a.ok) << a.tensor << ": error " << a.max_err << ", bound " << a.bound
                          << "; rms " << a.rms << ", bound " << a.rms_bound << "; "
                          << harness::format_case(c);
      }
    }
  }
}

// A capture takes launches and nothing else: an allocation, a wait or another stream would break
// it.
TEST_F(DeviceMerge, GraphReplayIsTheDirectCall) {
  const Case c = must_parse("b=2 hq=3 q=6 kv=1 d=64 dtype=bf16");
  const Parts parts = random_parts(c, kOneLaunch + 8);
  Part direct(c), replayed(c);
  upload(parts);
  expect_ok(direct.there.upload());
  expect_ok(merge_into(views(parts), direct.on_device()));
  expect_ok(direct.there.download());
  expect_ok(replayed.there.upload());
  const OwnedStream stream;
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  const Status captured = merge_into(views(parts), replayed.on_device(), {stream.get()});
  ASSERT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
  ASSERT_TRUE(captured.ok()) << captured.message();
  expect_ok(replayed.there.download());
  for (const double x : values_of(replayed.on_host().lse)) EXPECT_TRUE(std::isnan(x)) << "ran";
  cudaGraphExec_t replay = nullptr;
  ASSERT_CUDA(cudaGraphInstantiateWithFlags(&replay, graph, 0));
  ASSERT_CUDA(cudaGraphLaunch(replay, stream.get()));
  expect_ok(replayed.there.download());
  EXPECT_EQ(bits_of(replayed.on_host().out), bits_of(direct.on_host().out));
  EXPECT_EQ(bits_of(replayed.on_host().lse), bits_of(direct.on_host().lse));
  ASSERT_CUDA(cudaGraphExecDestroy(replay));
  ASSERT_CUDA(cudaGraphDestroy(graph));
}

fovea_tensor for_c(const TensorView& t) {
  fovea_tensor c{};
  c.data = t.data;
  c.dtype = static_cast<int32_t>(t.dtype);
  c.device_type = static_cast<int32_t>(t.device.type);
  c.device_index = t.device.index;
  c.rank = t.rank;
  std::copy(t.sizes.begin(), t.sizes.end(), c.sizes);
  std::copy(t.strides.begin(), t.strides.end(), c.strides);
  return c;
}

TEST_F(DeviceMerge, ThroughTheCApi) {
  const Case c = must_parse("b=2 hq=3 q=6 kv=1 d=40 pad=2 dtype=f16");
  const Parts parts = random_parts(c, 3);
  Part expected(c), found(c);
  upload(parts);
  for (Part* part : {&expected, &found}) expect_ok(part->there.upload());
  expect_ok(merge_into(views(parts), expected.on_device()));
  expect_ok(expected.there.download());
  std::vector<fovea_partial_result> list;
  for (const PartialResult& p : views(parts)) list.push_back({for_c(p.out), for_c(p.lse)});
  const fovea_tensor out = for_c(found.on_device().out), lse = for_c(found.on_device().lse);
  const OwnedStream stream;
  ASSERT_EQ(fovea_merge(list.data(), 3, &out, &lse, stream.get()), FOVEA_OK) << fovea_last_error();
  expect_ok(found.there.download());
  EXPECT_EQ(bits_of(found.on_host().out), bits_of(expected.on_host().out));
  EXPECT_EQ(bits_of(found.on_host().lse), bits_of(expected.on_host().lse));
}

TEST_F(DeviceMerge, RefusesOtherDevices) {
  const Case c = must_parse("b=1 hq=1 q=6 kv=1 d=8 dtype=f32");
  const Parts parts = random_parts(c, 2);
  Part to(c);
  upload(parts);
  expect_ok(to.there.upload());
  std::vector<PartialResult> list = views(parts);
  list[1].lse = parts[1]->on_host().lse;
  EXPECT_EQ(merge_into(list, to.on_device()).message(),
            "merge: parts[1].lse.device is cpu, must be cuda:0");
  PartialResult nowhere = to.on_device();
  nowhere.out.device.index = 9999;
  EXPECT_EQ(
      merge_into(views(parts), nowhere).message(),
      "merge: out.device.index is 9999, must be in 0.." + std::to_string(cuda_device_count() - 1));
  list.assign(kOneLaunch + 1, to.on_device());
  EXPECT_EQ(merge_into(list, to.on_device()).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fovea::test::merging
