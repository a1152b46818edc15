// Tables of the plans that live.
#include "layers/cpu/rope_table.h"

#include <map>
#include <mutex>
#include <tuple>

namespace fovea::layers::cpu {

RopeTable rope_table(const Rotation& rotation, size_t real_bytes,
                     void (*fill)(const Rotation&, void* table)) {
  using Key = std::tuple<int64_t, int64_t, double, size_t>;
  static std::mutex mutex;
  static std::map<Key, std::weak_ptr<const std::vector<std::byte>>> tables;
  const Key key{rotation.positions, rotation.turning, rotation.base, real_bytes};
  const std::lock_guard lock(mutex);
  if (RopeTable there = tables[key].lock()) return there;
  const auto bytes = static_cast<size_t>(rotation.positions * rotation.turning) * real_bytes;
  auto made = std::make_shared<std::vector<std::byte>>(bytes);
  fill(rotation, made->data());
  std::erase_if(tables, [](const auto& one) { return one.second.expired(); });
  tables[key] = made;
  return made;
}

}  // namespace fovea::layers::cpu
