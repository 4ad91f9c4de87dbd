// The memory of the cores: a caching pool per core, counted against the core's HBM.
//
// Small blocks (< 1 MiB) are rounded up to an eighth of their power of two (at least 256 bytes) and carved from 2 MiB
// segments; larger ones are mapped one by one. Freed blocks are kept, so that a large tensor does not fault its pages
// in anew at every step. Capacity is checked before memory exists: allocated + requested must fit. Cached blocks
// never cause an out-of-memory error: they go back to the system first. They also never make the pool much larger than
// the most that was ever in use at once, since the host has less memory than the cores it simulates.
#include "neuron.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <sys/mman.h>

#include <map>
#include <mutex>

namespace neuron {
namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr uint32_t kMagic = 0x4e52434b;
constexpr size_t kSmallLimit = size_t(1) << 20;
constexpr size_t kSegment = size_t(2) << 20;
constexpr size_t kPage = 4096;
constexpr int kClasses = 13 * 8;
// A cached large block serves a request of at least this share of it.
constexpr size_t kReuseNumerator = 7, kReuseDenominator = 8;
// The pool may reserve its peak use and a quarter, and this much.
constexpr size_t kSlack = size_t(64) << 20;

int small_class(size_t bytes) {
  if (bytes <= 256) {
    return 0;
  }
  const int power = 63 - __builtin_clzll(bytes - 1); // 2^power < bytes <= 2^(power + 1)
  const size_t eighth = size_t(1) << (power - 3);
  const int step = static_cast<int>((bytes - (size_t(1) << power) + eighth - 1) / eighth);
  return (power - 8) * 8 + step;
}

size_t class_bytes(int index) {
  const size_t base = size_t(256) << (index / 8);
  return base + base / 8 * (index % 8);
}

// Where segments and large blocks lie, for pointers whose origin is unknown (raw_deallocate).
class Mappings {
 public:
  void add(char* start, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[start] = bytes;
  }
  void remove(char* start) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(start);
  }
  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == ranges_.begin()) {
      return false;
    }
    --after;
    return pointer < after->first + after->second;
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> ranges_;
};

Mappings& mappings() {
  static Mappings* instance = new Mappings();
  return *instance;
}

char* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(
      OutOfMemoryError, memory != MAP_FAILED, "the host has no ", format_size(bytes), " left for simulated HBM");
  if (bytes >= kSegment) {
    madvise(memory, bytes, MADV_HUGEPAGE);
  }
  mappings().add(static_cast<char*>(memory), bytes);
  return static_cast<char*>(memory);
}

Block* make_block(char* base, int core, bool small, size_t capacity) {
  auto* block = new (base) Block();
  block->magic = kMagic;
  block->core = static_cast<int16_t>(core);
  block->small = small;
  block->capacity = capacity;
  return block;
}

void drop_alias(Block* block) {
  if (auto* alias = block->alias.exchange(nullptr)) {
    c10::raw::intrusive_ptr::decref(alias);
  }
}

class Pool {
 public:
  Block* take(int core, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++requests_;
    const bool small = bytes < kSmallLimit;
    const size_t charged = small ? class_bytes(small_class(bytes)) : (bytes + 255) / 256 * 256;
    check_capacity(core, bytes, charged);
    Block* block = small ? take_small(core, small_class(bytes)) : take_large(core, charged);
    block->charged = charged;
    block->next = nullptr;
    count(charged, small, true);
    return block;
  }

  void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    count(block->charged, block->small, false);
    ++frees_;
    if (block->small) {
      auto& list = small_[small_class(block->capacity)];
      block->next = list;
      list = block;
    } else {
      block->age = ++clock_;
      large_.emplace(block->capacity, block);
    }
  }

  void charge(int core, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++requests_;
    check_capacity(core, bytes, bytes);
    count(bytes, false, true);
    reserve(bytes, false);
  }

  void discharge(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++frees_;
    count(bytes, false, false);
    unreserve(bytes, false);
  }

  // Large cached blocks go back to the system; carved segments stay, they hold live neighbours.
  void release_cached() {
    std::lock_guard<std::mutex> lock(mutex_);
    release_until(SIZE_MAX);
  }

  Usage usage() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {stats_, frees_, requests_};
  }

  template <typename Reset>
  void reset(Reset apply) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* array : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                        &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
      for (auto& stat : *array) {
        apply(stat);
      }
    }
  }

 private:
  size_t allocated() const {
    return static_cast<size_t>(stats_.allocated_bytes[0].current);
  }
  size_t reserved() const {
    return static_cast<size_t>(stats_.reserved_bytes[0].current);
  }

  void check_capacity(int core, size_t bytes, size_t charged) {
    const size_t limit = config().hbm_bytes;
    if (C10_LIKELY(charged <= limit && allocated() <= limit - charged)) {
      return;
    }
    ++stats_.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "neuron:", core, " out of memory: requested ", format_size(bytes), ", allocated ", format_size(allocated()),
        ", reserved ", format_size(reserved()), ", limit ", format_size(limit), " (", bytes, " / ", allocated(), " / ",
        reserved(), " / ", limit, " bytes; peak ", format_size(stats_.allocated_bytes[0].peak),
        "). The limit is the HBM of one logical core of the simulated instance.");
  }

  Block* take_small(int core, int index) {
    if (Block* block = small_[index]) {
      small_[index] = block->next;
      return block;
    }
    const size_t capacity = class_bytes(index);
    const size_t needed = kHeader + (capacity + kHeader - 1) / kHeader * kHeader; // data stay 64-byte aligned
    if (segment_left_ < needed) {
      segment_ = map_memory(kSegment);
      segment_left_ = kSegment;
    }
    Block* block = make_block(segment_, core, true, capacity);
    segment_ += needed;
    segment_left_ -= needed;
    reserve(capacity, true);
    return block;
  }

  Block* take_large(int core, size_t bytes) {
    auto found = large_.lower_bound(bytes);
    if (found != large_.end() && found->first / kReuseDenominator * kReuseNumerator <= bytes) {
      Block* block = found->second;
      large_.erase(found);
      return block;
    }
    const size_t peak = static_cast<size_t>(stats_.allocated_bytes[0].peak);
    const size_t bound = std::min(config().hbm_bytes, peak + peak / 4 + kSlack);
    if (reserved() + bytes > bound) {
      stats_.num_alloc_retries += reserved() + bytes > config().hbm_bytes;
      release_until(reserved() + bytes - bound);
    }
    const size_t mapped = (bytes + kHeader + kPage - 1) / kPage * kPage;
    Block* block = make_block(map_memory(mapped), core, false, bytes);
    reserve(bytes, false);
    return block;
  }

  // Unmaps cached large blocks, the longest unused first, until `bytes` are released or none is left.
  void release_until(size_t bytes) {
    size_t released = 0;
    while (!large_.empty() && released < bytes) {
      auto oldest = large_.begin();
      for (auto one = large_.begin(); one != large_.end(); ++one) {
        if (one->second->age < oldest->second->age) {
          oldest = one;
        }
      }
      Block* block = oldest->second;
      released += block->capacity;
      large_.erase(oldest);
      unreserve(block->capacity, false);
      drop_alias(block);
      const size_t mapped = (block->capacity + kHeader + kPage - 1) / kPage * kPage;
      mappings().remove(reinterpret_cast<char*>(block));
      munmap(block, mapped);
    }
  }

  void count(size_t bytes, bool small, bool up) {
    const int pool = static_cast<int>(small ? StatType::SMALL_POOL : StatType::LARGE_POOL);
    for (int which : {0, pool}) {
      for (auto* sizes : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
        up ? (*sizes)[which].increase(bytes) : (*sizes)[which].decrease(bytes);
      }
      for (auto* counts : {&stats_.allocation, &stats_.active}) {
        up ? (*counts)[which].increase(1) : (*counts)[which].decrease(1);
      }
    }
  }
  void reserve(size_t bytes, bool small) {
    for (int which : {0, small ? 1 : 2}) {
      stats_.reserved_bytes[which].increase(bytes);
      stats_.segment[which].increase(1);
    }
    ++stats_.num_device_alloc;
  }
  void unreserve(size_t bytes, bool small) {
    for (int which : {0, small ? 1 : 2}) {
      stats_.reserved_bytes[which].decrease(bytes);
      stats_.segment[which].decrease(1);
    }
    ++stats_.num_device_free;
  }

  std::mutex mutex_;
  Block* small_[kClasses] = {};
  std::multimap<size_t, Block*> large_;
  char* segment_ = nullptr;
  size_t segment_left_ = 0;
  uint64_t clock_ = 0;
  DeviceStats stats_;
  int64_t frees_ = 0, requests_ = 0;
};

Pool& pool(int core) {
  static Pool* pools = new Pool[kMaxCores]; // never destroyed: tensors may outlive static destructors
  return pools[core];
}

class NeuronAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int core = current_core();
    return neuron::allocate(core, bytes, core_device(core));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool_id*/) override {
    for (int core = 0; core < config().num_cores; ++core) {
      pool(core).release_cached();
    }
  }
  void recordStream(const c10::DataPtr& /*pointer*/, c10::Stream /*stream*/) override {} // work is synchronous
  DeviceStats getDeviceStats(c10::DeviceIndex core) override {
    return pool(check_core(core)).usage().stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex core) override {
    pool(check_core(core)).reset([](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex core) override {
    pool(check_core(core)).reset([](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex core) override {
    const size_t limit = config().hbm_bytes;
    const size_t used = pool(check_core(core)).usage().stats.allocated_bytes[0].current;
    return {limit - std::min(used, limit), limit};
  }
};

NeuronAllocator* the_allocator() {
  static NeuronAllocator* instance = new NeuronAllocator();
  return instance;
}

} // namespace

c10::DataPtr allocate(int core, size_t bytes, c10::Device device) {
  if (bytes == 0) {
    return {nullptr, device};
  }
  mark_used();
  Block* block = pool(core).take(core, bytes);
  void* data = reinterpret_cast<char*>(block) + kHeader;
  // The context is the data pointer itself: `Allocator::raw_allocate` asserts it.
  return {data, data, &free_block, device};
}

void free_block(void* context) {
  if (context == nullptr) {
    return;
  }
  auto* block = reinterpret_cast<Block*>(static_cast<char*>(context) - kHeader);
  TORCH_INTERNAL_ASSERT(block->magic == kMagic, "not a block of a neuron pool");
  auto* alias = block->alias.load();
  if (alias != nullptr && c10::raw::intrusive_ptr::use_count(alias) > 1) {
    // Somebody kept a CPU alias (a Python operator that stored its argument): the alias now owns the block.
    block->alias.store(nullptr);
    alias->set_data_ptr_noswap(c10::DataPtr(context, context, &free_block, c10::Device(c10::kCPU)));
    c10::raw::intrusive_ptr::decref(alias);
    return;
  }
  pool(block->core).give(block);
}

c10::DataPtr adopt(int core, c10::DataPtr&& inner, size_t bytes) {
  pool(core).charge(core, bytes);
  void* data = inner.get();
  auto* context = new Adopted{std::move(inner), core, bytes};
  return {data, context, &free_adopted, core_device(core)};
}

void free_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  pool(adopted->core).discharge(adopted->charged);
  delete adopted;
}

bool is_pool_pointer(const void* data) {
  return mappings().contains(data);
}

Usage usage(int core) {
  return pool(check_core(core)).usage();
}

c10::DeviceAllocator* device_allocator() {
  return the_allocator();
}

void register_device_allocator() {
  c10::SetAllocator(kNeuron, the_allocator());
}

} // namespace neuron
