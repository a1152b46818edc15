// Mutations of one tensor: its shape, type, device, strides and pointer.
#include <algorithm>
#include <limits>

#include "fuzz/invalid_mutations.h"

namespace fovea::invalid {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// A given tensor that satisfies `fits`, or nothing.
template <typename Fits>
const Argument* pick(Subject& s, std::vector<Argument>& there, Fits fits) {
  there = s.given();
  std::erase_if(there, [&](const Argument& a) { return !fits(a); });
  return there.empty() ? nullptr : &s.random.pick(there);
}

// A dimension along which the tensor is stepped.
int stepped_dim(Subject& s, const TensorView& t) {
  std::vector<int> dims;
  for (int i = 0; i < t.rank; ++i) {
    if (t.sizes[static_cast<size_t>(i)] > 1) dims.push_back(i);
  }
  return dims.empty() ? -1 : s.random.pick(dims);
}

bool is_stepped(const Argument& a) {
  if (!nonempty(*a.view)) return false;
  for (int i = 0; i < a.view->rank; ++i) {
    if (a.view->sizes[static_cast<size_t>(i)] > 1) return true;
  }
  return false;
}

std::string rank(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument&) { return true; });
  std::vector<int> ranks = {-1, 1, 2, 3, 4, 5, 1000};
  std::erase(ranks, a->view->rank);
  if (a->name == "alibi_slopes") ranks = {-1, 3, 4, 5};  // 1 and 2 may both be right
  a->view->rank = s.random.pick(ranks);
  return a->name + ".rank is ";
}

std::string size(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument&) { return true; });
  const auto dim = static_cast<size_t>(s.random.range(0, a->view->rank - 1));
  const int64_t right = a->view->sizes[dim];
  // A broadcast dimension may be 1 or full; these are neither.
  const int64_t full = std::max({s.problem.batch, s.problem.head_q, s.problem.q_len, right});
  std::vector<int64_t> sizes = {-1, full + 1, full + 100, kMost};
  if (right != 0 && !a->broadcasts) sizes.push_back(right - 1);
  a->view->sizes[dim] = s.random.pick(sizes);
  return a->name + ".";
}

std::string dtype(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument&) { return true; });
  std::vector<DType> wrong;
  for (int n = -1; n <= 6; ++n) {
    const auto candidate = static_cast<DType>(n);
    if (std::find(a->dtypes.begin(), a->dtypes.end(), candidate) == a->dtypes.end()) {
      wrong.push_back(candidate);
    }
  }
  a->view->dtype = s.random.pick(wrong);
  return a->name + ".dtype is ";
}

std::string device(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument&) { return true; });
  a->view->device = s.random.pick<Device>(
      {Device::cuda(0), Device::cuda(3), Device{static_cast<DeviceType>(0), 0}});
  return a->name + ".device is ";
}

std::string null_data(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument& x) { return nonempty(*x.view); });
  if (a == nullptr) return {};
  a->view->data = nullptr;
  return a->name + ".data is null";
}

std::string misaligned(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument& x) {
    return nonempty(*x.view) && dtype_bytes(x.view->dtype) > 1;
  });
  if (a == nullptr) return {};
  a->view->data = static_cast<char*>(a->view->data) + 1;
  return a->name + ".data is ";
}

std::string negative_stride(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, is_stepped);
  if (a == nullptr) return {};
  const int dim = stepped_dim(s, *a->view);
  int64_t& stride = a->view->strides[static_cast<size_t>(dim)];
  stride = s.random.chance(50) ? -std::max<int64_t>(stride, 1) : -kMost;
  return a->name + ".strides[" + std::to_string(dim) + "] is ";
}

std::string huge_stride(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, is_stepped);
  if (a == nullptr) return {};
  const int dim = stepped_dim(s, *a->view);
  a->view->strides[static_cast<size_t>(dim)] = kMost;
  return a->name + ".strides[";
}

std::string last_stride(Subject& s) {
  std::vector<Argument> there;
  const Argument* a = pick(s, there, [](const Argument& x) {
    return nonempty(*x.view) && !x.any_last_stride &&
           x.view->sizes[static_cast<size_t>(x.view->rank - 1)] > 1;
  });
  if (a == nullptr) return {};
  const int last = a->view->rank - 1;
  a->view->strides[static_cast<size_t>(last)] = s.random.pick<int64_t>({0, 2, 17});
  return a->name + ".strides[" + std::to_string(last) + "] is ";
}

// Two dimensions of an output that step alike, or one that does not step at all.
std::string overlapping_output(Subject& s) {
  std::vector<Argument> there;
  const Argument* a =
      pick(s, there, [](const Argument& x) { return x.use == Use::kOutput && is_stepped(x); });
  if (a == nullptr) return {};
  const int dim = stepped_dim(s, *a->view), other = stepped_dim(s, *a->view);
  auto& strides = a->view->strides;
  strides[static_cast<size_t>(dim)] = dim == other ? 0 : strides[static_cast<size_t>(other)];
  return a->name + ".strides[";
}

std::string aliased_output(Subject& s) {
  std::vector<Argument> there;
  const Argument* a =
      pick(s, there, [](const Argument& x) { return x.use == Use::kOutput && nonempty(*x.view); });
  if (a == nullptr) return {};
  std::vector<Argument> others;
  const Argument* b =
      pick(s, others, [&](const Argument& x) { return x.name != a->name && nonempty(*x.view); });
  if (b == nullptr) return {};
  a->view->data = b->view->data;
  // Of two outputs the later one is named first.
  const auto place = [&](const Argument* x) { return s.argument(x->name).view; };
  const auto index = [&](const Argument* x) {
    return std::find_if(s.arguments.begin(), s.arguments.end(),
                        [&](const Argument& y) { return y.view == place(x); }) -
           s.arguments.begin();
  };
  const bool later = b->use == Use::kOutput && index(b) > index(a);
  return (later ? b : a)->name + ".data is ";
}

constexpr Mutation kTensorMutations[] = {
    {"rank", rank, false},
    {"size", size, false},
    {"dtype", dtype, false},
    {"device", device, false},
    {"null_data", null_data, false},
    {"misaligned", misaligned, false},
    {"negative_stride", negative_stride, false},
    {"huge_stride", huge_stride, false},
    {"last_stride", last_stride, false},
    {"overlapping_output", overlapping_output, false},
    {"aliased_output", aliased_output, false},
};

}  // namespace

std::span<const Mutation> tensor_mutations() { return kTensorMutations; }

}  // namespace fovea::invalid
