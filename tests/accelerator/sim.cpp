// An accelerator without hardware, under torch's PrivateUse1: a device type with memory, streams, generators and rules
// of its own, whose kernels are those of the CPU.
//
// Its memory is host memory, so a kernel of the CPU runs on an alias of a device tensor: writes go through, and views
// stay views. What a GPU refuses is refused: operands on several devices, generators of another device and, if asked
// for, float64. What costs on a GPU is counted: kernels, copies in each direction, and host reads, for which the host
// waits for the device.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Operators.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_set>

namespace sim {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue, c10::Stream;
using c10::CachingDeviceAllocator::DeviceStats;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex NUM_DEVICES = 2;

// What is counted, and what is forbidden

std::atomic<int64_t> host_reads{0}, copies_to_host{0}, copies_to_device{0}, kernels{0};
std::atomic<int64_t> sync_debug_mode{0}, memory_limit{std::numeric_limits<int64_t>::max()};
std::atomic<bool> has_float64{true};
std::mutex names_lock;
std::map<std::string, int64_t> kernel_names;

void count_kernel(const std::string& name) {
  kernels++;
  std::lock_guard<std::mutex> guard(names_lock);
  kernel_names[name]++;
}

void count_host_read(const std::string& name) {
  host_reads++;
  if (sync_debug_mode == 1) TORCH_WARN("the host waits for the device: ", name);
  TORCH_CHECK(sync_debug_mode != 2, "the host would wait for the device: ", name);
}

void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      has_float64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
      "Cannot convert a sim Tensor to float64 dtype as the sim device doesn't support float64. Please use float32.");
}

// Memory

thread_local DeviceIndex current_device = 0;

struct Allocator final : c10::DeviceAllocator {
  std::mutex lock;
  DeviceStats stats[NUM_DEVICES];

  struct Block {
    c10::DataPtr memory;
    int64_t size;
    DeviceIndex device;
  };

  c10::DataPtr adopt(c10::DataPtr memory, int64_t size, DeviceIndex device) {
    std::lock_guard<std::mutex> guard(lock);
    auto &bytes = stats[device].allocated_bytes[0], &reserved = stats[device].reserved_bytes[0];
    bool fits = bytes.current + size <= memory_limit;
    TORCH_CHECK_WITH(OutOfMemoryError, fits, "sim out of memory. Tried to allocate ", size, " bytes.");
    bytes.increase(size), reserved.increase(size), stats[device].allocation[0].increase(1);
    void* data = memory.get();
    return {data, new Block{std::move(memory), size, device}, &release, Device(TYPE, device)};
  }

  static void release(void* context);

  c10::DataPtr allocate(size_t size) override {
    return adopt(at::getCPUAllocator()->allocate(size), static_cast<int64_t>(size), current_device);
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    stats[device].allocated_bytes[0].reset_peak();
  }
};
Allocator& allocator() {
  static auto* instance = new Allocator;  // leaked: tensors may outlive static objects
  return *instance;
}
void Allocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> guard(allocator().lock);
  auto& stats = allocator().stats[block->device];
  stats.allocated_bytes[0].decrease(block->size), stats.reserved_bytes[0].decrease(block->size);
  stats.allocation[0].decrease(1);
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  std::mutex lock;
  std::map<const void*, size_t> blocks;

  c10::DataPtr allocate(size_t size) override {
    auto memory = at::getCPUAllocator()->allocate(size);
    void* data = memory.get();
    std::lock_guard<std::mutex> guard(lock);
    blocks[data] = size;
    auto owner = std::make_shared<c10::DataPtr>(std::move(memory));
    return c10::InefficientStdFunctionContext::makeDataPtr(data, [this, owner](void* pointer) {
      std::lock_guard<std::mutex> guard(lock);
      blocks.erase(pointer);
    }, c10::kCPU);
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    auto next = blocks.upper_bound(data);
    return next != blocks.begin() && data < static_cast<const char*>(std::prev(next)->first) + std::prev(next)->second;
  }
};
PinnedAllocator& pinned_allocator() {
  static auto* instance = new PinnedAllocator;
  return *instance;
}

// Streams and events: everything runs at once and in order, so that they only need to be told apart

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;
  static inline std::atomic<c10::StreamId> num_streams{0};
  static inline thread_local c10::StreamId streams[NUM_DEVICES] = {};

  static Device with_index(Device device) { return {TYPE, index_of(device)}; }
  static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  c10::DeviceType type() const override { return TYPE; }
  Device getDevice() const override { return {TYPE, current_device}; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "sim has ", int(NUM_DEVICES), " devices, without ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  Stream stream(Device device, c10::StreamId id) const { return Stream(Stream::UNSAFE, {TYPE, index_of(device)}, id); }
  Stream getStream(Device device) const override { return stream(device, streams[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, ++num_streams); }
  Stream getNewStream(Device device, int) const override { return stream(device, ++num_streams); }
  Stream exchangeStream(Stream next) const override {
    return stream(next.device(), std::exchange(streams[index_of(next.device())], next.id()));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new Clock::time_point(Clock::now());
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    auto time = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return std::chrono::duration<double, std::milli>(time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Generators: as on other devices, a seed gives other numbers than on the CPU, unless asked for those

std::atomic<uint64_t> seed_mask{0};

struct Generator final : c10::GeneratorImpl {
  at::Generator host;

  Generator(DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl({TYPE, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed ^ seed_mask); }
  uint64_t current_seed() const override { return host.current_seed() ^ seed_mask; }
  uint64_t seed() override { return host.seed() ^ seed_mask; }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim generators have no offset"); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), host.clone()); }
};
at::Generator make_generator(DeviceIndex device) {
  auto host = at::detail::createCPUGenerator(c10::default_rng_seed_val ^ seed_mask);
  return at::make_generator<Generator>(std::max<DeviceIndex>(device, 0), std::move(host));
}
const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, NUM_DEVICES>{make_generator(0), make_generator(1)};
  return generators->at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({TYPE, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({TYPE, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return make_generator(device); }
  Device getDeviceFromPtr(void*) const override { return {TYPE, current_device}; }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator().allocate(size);
    memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

// Device tensors as tensors of the CPU and back, for the length of one kernel

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

struct Call {
  std::vector<std::pair<Tensor, Tensor>> aliases;  // of each operand: on the device, and on the CPU
  std::map<c10::StorageImpl*, c10::Storage> to_cpu, to_device;
  std::optional<Device> device;

  static Tensor over(const c10::Storage& storage, c10::DispatchKey key, const Tensor& like) {
    c10::DispatchKeySet keys(key);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.is_conj()) tensor._set_conj(true);
    if (like.is_neg()) tensor._set_neg(true);
    return tensor;
  }

  Tensor alias(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    auto& storage = to_cpu[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      c10::DataPtr data(tensor.storage().mutable_data(), c10::kCPU);
      storage = c10::Storage({}, tensor.storage().nbytes(), std::move(data), at::getCPUAllocator(), true);
      to_device[storage.unsafeGetStorageImpl()] = tensor.storage();
    }
    aliases.emplace_back(tensor, over(storage, c10::DispatchKey::CPU, tensor));
    return aliases.back().second;
  }

  // Bring a result of the CPU to the device: an operand that was written to, a view of an operand, or a new tensor.
  Tensor result(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [original, copy] : aliases)
      if (copy.is_same(tensor)) return original;
    check_dtype(tensor.scalar_type());
    TORCH_CHECK(tensor.layout() == c10::kStrided, "sim has only strided tensors");
    auto& storage = to_device[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) storage = adopt(tensor.storage());
    return over(storage, c10::DispatchKey::PrivateUse1, tensor);
  }

  c10::Storage adopt(const c10::Storage& from) {
    auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
    c10::DataPtr memory(from.mutable_data(), new c10::Storage(from), release, c10::kCPU);
    auto data = allocator().adopt(std::move(memory), static_cast<int64_t>(from.nbytes()), device->index());
    return {{}, from.nbytes(), std::move(data), &allocator(), true};
  }

  // A kernel may have resized what it wrote to.
  void finish() {
    for (auto& [original, copy] : aliases) {
      auto &storage = original.storage(), &written = copy.storage();
      if (storage.data() != written.data()) {
        auto resized = adopt(written);
        auto& data = resized.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
        storage.set_nbytes(written.nbytes());
      }
      if (original.sizes() != copy.sizes() || original.strides() != copy.strides())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(copy.sizes(), copy.strides(), copy.storage_offset());
    }
  }
};

// Rules about operands

using Names = std::unordered_set<std::string>;
const Names READS{"nonzero",    "masked_select",      "equal",    "_unique", "_unique2",
                  "unique_dim", "unique_consecutive", "bincount", "histc",   "linalg_eig",
                  "_linalg_eigh", "_linalg_svd"};
const Names INDEXING{"index", "_index_put_impl_"};

// Operators whose operands may be numbers in tensors of the host.
bool takes_numbers_of_host(const c10::OperatorHandle& op) {
  static const Names names = [] {
    Names found{"fill", "masked_fill", "index_fill", "_index_put_impl_", "mse_loss", "smooth_l1_loss", "huber_loss",
                "bernoulli", "floor_divide", "isin", "complex", "polar", "searchsorted", "_fused_adam_",
                "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"};
    for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      auto op = c10::Dispatcher::singleton().findOp(name);
      bool is_pointwise = op && op->hasSchema() && op->hasTag(at::Tag::pointwise);
      if (is_pointwise || name.name.rfind("aten::_foreach_", 0) == 0) found.insert(name.name.substr(6));
    }
    return found;
  }();
  auto name = op.schema().name().substr(6);
  if (!names.count(name) && name.back() == '_') name.pop_back();
  return names.count(name) > 0;
}

template <class Visit>
void for_each_tensor(IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
  }
}

template <class Change>
void change_tensors(IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    value = changed;
  }
}

void check_same_device(bool is_same, std::optional<Device> device, const Tensor& tensor, const std::string& name) {
  TORCH_CHECK(is_same, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and ", tensor.device(), "! (when checking the arguments of aten::", name, ")");
}

// Check the operands of an operator as CUDA does, and return the device that it runs on.
Device check_operands(const c10::OperatorHandle& op, std::vector<IValue>& arguments, const std::string& name) {
  std::optional<Device> device;
  for (auto& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!on_device(tensor)) return;
      check_same_device(device.value_or(tensor.device()) == tensor.device(), device, tensor, name);
      device = tensor.device();
    });
    if (argument.isDevice() && argument.toDevice().type() == TYPE) device = Guard::with_index(argument.toDevice());
  }
  // Without either, only a generator of the device can have led here.
  TORCH_CHECK(device, "Expected a 'cpu' device type for generator but found 'sim'");
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = op.schema().arguments()[i].alias_info();
    bool written = alias && alias->isWrite(), is_index = INDEXING.count(name) && i == 1;
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (on_device(tensor)) {
        bool is_mask = is_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
        bool is_masked_fill = name == "_index_put_impl_" && arguments[2].toTensor().dim() == 0;
        if (is_mask && !is_masked_fill) count_host_read("index by a mask");
      } else if (is_index && on_device(arguments[0].toTensor())) {
        copies_to_device++;
      } else {
        bool is_number = tensor.dim() == 0 && !written && takes_numbers_of_host(op);
        check_same_device(is_number, device, tensor, name);
      }
    });
    auto is_generator = op.schema().arguments()[i].type()->str().rfind("Generator", 0) == 0;
    if (is_generator && arguments[i].isNone()) arguments[i] = default_generator(device->index());
    if (arguments[i].isGenerator()) {
      auto generator = arguments[i].toGenerator();
      auto type = generator.device().type();
      TORCH_CHECK(type == TYPE, "Expected a 'sim' device type for generator but found '", type, "'");
      arguments[i] = generator.get<Generator>()->host;
    }
    if (arguments[i].isDevice()) arguments[i] = Device(c10::kCPU);
  }
  return *device;
}

// Run the kernel of the CPU.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const auto& schema = op.schema();
  auto name = schema.name().substr(schema.name().rfind(':') + 1);
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  Call call;
  call.device = check_operands(op, arguments, name);
  if (READS.count(name) || (name == "repeat_interleave" && arguments.back().isNone())) count_host_read(name);
  for (auto& argument : arguments) change_tensors(argument, [&](const Tensor& tensor) { return call.alias(tensor); });
  for (auto& argument : arguments) stack->push_back(std::move(argument));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish();
  bool is_view = schema.returns().size() > 0 && !schema.is_mutable();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    for_each_tensor((*stack)[i], [&](const Tensor& tensor) {
      is_view = is_view && tensor.defined() && call.to_device.count(tensor.storage().unsafeGetStorageImpl());
    });
    is_view = is_view && !(*stack)[i].isBool();
    change_tensors((*stack)[i], [&](const Tensor& tensor) { return call.result(tensor); });
  }
  if (!is_view) count_kernel(name);
}

const c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = find("aten::convolution");
  run(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = find("aten::convolution_backward");
  auto first = stack->end() - 10;  // grad_output, input, weight, and here the size of the bias is missing
  auto has_bias = stack->back().toBoolList().get(2);
  auto size = has_bias ? IValue(std::vector<int64_t>{first->toTensor().size(1)}) : IValue();
  stack->insert(first + 3, size);
  run(op, stack);
}

// Operators that are not kernels, and that no kernel of the CPU can do for a device

using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

c10::ScalarType check_options(Dtype dtype, Layout layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "sim has only strided tensors");
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  check_dtype(type);
  return type;
}

Tensor empty(at::IntArrayRef size, Dtype dtype, Layout layout, std::optional<Device> device,
             std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  auto type = check_options(dtype, layout, pin_memory);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), KEYS, type, format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout layout,
                     std::optional<Device> device, std::optional<bool> pin_memory) {
  auto type = check_options(dtype, layout, pin_memory);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), KEYS, type);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Call call;
  if (on_device(from) && on_device(to)) {
    count_kernel("copy_");
  } else if (on_device(to)) {
    copies_to_device++;
  } else {
    copies_to_host++;
    if (!non_blocking || !pinned_allocator().holds(to.const_data_ptr())) count_host_read("copy to the host");
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  call.alias(to).copy_(call.alias(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar local_scalar_dense(const Tensor& tensor) {
  count_host_read("item");
  return at::_local_scalar_dense(Call().alias(tensor));
}

Tensor& set_storage(
    Tensor& tensor, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  check_same_device(storage.device() == tensor.device(), storage.device(), tensor, "set_");
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

// As between the CPU and CUDA, so that parameters keep their identity when a network moves.
bool shallow_copies(const Tensor& tensor, const Tensor& from) {
  return tensor.layout() == c10::kStrided && from.layout() == c10::kStrided && !tensor.is_meta() && !from.is_meta();
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(input) : input * mask * (1 / (1 - p)), mask};
}

// Fused attention, wherever the CPU has it

using Mask = std::optional<Tensor>;
using Scale = std::optional<double>;

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, double dropout,
                         bool is_causal, Scale scale, bool enable_gqa) {
  Call call;
  auto alias = [&](const Tensor& tensor) { return call.alias(tensor).requires_grad_(tensor.requires_grad()); };
  auto choice = at::_fused_sdp_choice(alias(query), alias(key), alias(value), mask ? Mask(alias(*mask)) : mask, dropout,
                                      is_causal, scale, enable_gqa);
  bool is_fused = choice == static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  return static_cast<int64_t>(is_fused ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, double dropout, bool is_causal, bool,
    Scale scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call;
  call.device = query.device();
  count_kernel("attention");
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      call.alias(query), call.alias(key), call.alias(value), dropout, is_causal, mask ? Mask(call.alias(*mask)) : mask,
      scale);
  return {call.result(output), call.result(logsumexp), {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, int64_t, int64_t,
    double dropout, bool is_causal, const Tensor&, const Tensor&, Scale scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call;
  call.device = query.device();
  count_kernel("attention_backward");
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      call.alias(grad), call.alias(query), call.alias(key), call.alias(value), call.alias(output),
      call.alias(logsumexp), dropout, is_causal, mask.defined() ? Mask(call.alias(mask)) : Mask(), scale);
  return {call.result(of_query), call.result(of_key), call.result(of_value), {}};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_", at::native::set_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", [](Tensor& tensor, c10::Storage source) -> Tensor& {
    return at::native::set_(tensor, std::move(source));
  });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", shallow_copies);
  m.impl("record_stream", [](Tensor&, Stream) {});
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Torch would compose these of several operators, where CUDA has one kernel as the CPU has.
  for (auto name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "_stack", "_stack.out",
                    "native_channel_shuffle", "index.Tensor", "all.dims", "any.dims", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0 && name.name != "aten::_foreach_copy_")  // may copy between devices
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

using namespace at;  // for the macros
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

// What the Python module asks for

TORCH_LIBRARY(sim, m) {
  m.def("register_hooks() -> ()", [] {
    at::SetAllocator(TYPE, &allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::globalContext().lazyInitDevice(TYPE);
  });
  m.def("counts() -> int[]",
        [] { return std::vector<int64_t>{kernels, host_reads, copies_to_host, copies_to_device}; });
  m.def("kernel_names() -> Dict(str, int)", [] {
    std::lock_guard<std::mutex> guard(names_lock);
    c10::Dict<std::string, int64_t> names;
    for (auto& [name, count] : kernel_names) names.insert(name, count);
    return names;
  });
  m.def("reset_counts() -> ()", [] {
    std::lock_guard<std::mutex> guard(names_lock);
    kernels = 0, host_reads = 0, copies_to_host = 0, copies_to_device = 0;
    kernel_names.clear();
  });
  m.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug_mode() -> int", []() -> int64_t { return sync_debug_mode; });
  m.def("set_float64(bool supported) -> ()", [](bool supported) { has_float64 = supported; });
  m.def("set_seed_mask(int mask) -> ()", [](int64_t mask) { seed_mask = static_cast<uint64_t>(mask); });
  m.def("set_memory_limit(int size) -> ()", [](int64_t size) { memory_limit = size; });
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return default_generator(static_cast<DeviceIndex>(device)); });
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}
