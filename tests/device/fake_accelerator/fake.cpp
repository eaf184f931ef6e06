// The machine of runtime.h as torch's PrivateUse1 device.
//
// Copies, allocations and record_stream are the device's own; all other operations are
// computed on the host, between two copies that are waited for.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "runtime.h"

namespace {

using fake::Block;
using fake::Machine;
using fake::SignalPtr;

constexpr auto kType = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current_device = 0;
thread_local int current_streams[fake::kDevices] = {};

fake::Stream& stream_of(const c10::Stream& stream) {
  return Machine::get().streams[stream.device_index()][stream.id()];
}
fake::Stream& current_stream(c10::DeviceIndex device) {
  return Machine::get().streams[device][current_streams[device]];
}
fake::Memory& memory_of(const at::Tensor& tensor) {
  return Machine::get().memory[tensor.device().index()];
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < fake::kDevices, "there is no ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Stream getStream(Device device) const override {
    auto index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kType, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    auto index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kType, index), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    auto index = device.has_index() ? device.index() : current_device;
    int id = 1 + Machine::get().next_stream++ % (fake::kStreams - 1);
    return Stream(Stream::UNSAFE, Device(kType, index), id);
  }
  Stream exchangeStream(Stream stream) const override {
    auto old = getStream(stream.device());
    current_streams[stream.device_index()] = static_cast<int>(stream.id());
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return fake::kDevices; }
  bool queryStream(const Stream& stream) const override {
    return stream_of(stream).is_idle();
  }
  void synchronizeStream(const Stream& stream) const override {
    stream_of(stream).synchronize();
  }
  bool isStreamCapturing(const Stream& stream) const override {
    return stream_of(stream).is_capturing;
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    auto index = device < 0 ? current_device : device;
    for (auto& stream : Machine::get().streams[index]) stream.synchronize();
  }
  void record(void** event, const Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new SignalPtr;
    *static_cast<SignalPtr*>(*event) = stream_of(stream).mark();
  }
  void block(void* event, const Stream& stream) const override {
    stream_of(stream).push([at = *static_cast<SignalPtr*>(event)] { at->wait(); });
  }
  bool queryEvent(void* event) const override {
    return (*static_cast<SignalPtr*>(event))->query();
  }
  void synchronizeEvent(void* event) const override {
    (*static_cast<SignalPtr*>(event))->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<SignalPtr*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto seconds =
        (*static_cast<SignalPtr*>(to))->at - (*static_cast<SignalPtr*>(from))->at;
    return std::chrono::duration<double, std::milli>(seconds).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(kType, current_device);
    if (!nbytes) return {nullptr, device};
    auto& machine = Machine::get();
    auto* stream = &current_stream(current_device);
    auto* block = machine.memory[current_device].allocate(nbytes, stream);
    TORCH_CHECK_WITH(OutOfMemoryError, block, "fake device out of memory: no room for ",
                     nbytes, " bytes");
    return {reinterpret_cast<void*>(block->address), block, &free, device};
  }
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    for (auto& memory : Machine::get().memory)
      if (memory.has(reinterpret_cast<void*>(block->address))) return memory.release(block);
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the fake device clones by copying tensors");
  }
};
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = Machine::get().host.allocate(nbytes);
    return {at, at, &free, c10::Device(c10::DeviceType::CPU)};
  }
  static void free(void* at) { Machine::get().host.release(at); }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};
DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return fake::kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kType, device});
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return Machine::get().host.kind_of(data, 1) != fake::Host::kPageable;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kType, Machine::get().memory[1].has(data) ? c10::DeviceIndex{1} : c10::DeviceIndex{0}};
  }
};

// -- copies ---------------------------------------------------------------------------

// Begin to copy host memory to the device. It is read late, from its address, if it is
// page-locked; else before this returns.
void to_device(void* to, const void* from, size_t nbytes, fake::Memory& memory,
               fake::Stream& stream) {
  char* place = memory.shadow(to);
  auto& host = Machine::get().host;
  auto end = std::make_shared<fake::Signal>();
  switch (host.kind_of(from, nbytes, end)) {
    case fake::Host::kAllocated:
      return stream.push([=] {
        memcpy(place, from, nbytes);
        end->set();
      });
    case fake::Host::kRegistered:
      return stream.push([=, &host] { host.read(place, from, nbytes); });
    case fake::Host::kPageable:
      break;
  }
  auto staged = std::make_shared<std::vector<char>>(nbytes);
  memcpy(staged->data(), from, nbytes);
  stream.push([=] { memcpy(place, staged->data(), nbytes); });
}

// Begin to copy to the host; wait for it unless that memory is page-locked.
void to_host(void* to, const void* from, size_t nbytes, fake::Memory& memory,
             fake::Stream& stream, bool non_blocking) {
  const char* place = memory.shadow(from);
  auto end = std::make_shared<fake::Signal>();
  bool is_locked = Machine::get().host.kind_of(to, nbytes, end) != fake::Host::kPageable;
  stream.push([=] {
    memcpy(to, place, nbytes);
    end->set();
  });
  if (!(is_locked && non_blocking)) end->wait();
}

// Begin to copy, and convert, between tensors of one device.
void within(const at::Tensor& from, const at::Tensor& to, fake::Stream& stream) {
  auto view = [](const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto options = at::TensorOptions().dtype(tensor.scalar_type());
    auto at = memory_of(tensor).shadow(tensor.data_ptr());
    return at::from_blob(at, tensor.sizes(), tensor.strides(), options);
  };
  stream.push([from = view(from), to = view(to)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    at::set_num_threads(1);  // of this thread
    to.copy_(from);
  });
}

bool is_like(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.is_non_overlapping_and_dense();
}

at::Tensor on_device(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!self.numel()) return to;
  auto device = self.device().type() == kType ? self.device() : to.device();
  c10::OptionalDeviceGuard guard(device);
  auto& stream = current_stream(device.index());
  auto& memory = Machine::get().memory[device.index()];
  if (self.device() == to.device()) {
    within(self, to, stream);
  } else if (self.is_cpu()) {
    auto host = self.resolve_conj().resolve_neg();
    if (!host.is_non_overlapping_and_dense()) host = host.contiguous();
    auto place = is_like(host, to) ? to : on_device(host, device);
    to_device(place.data_ptr(), host.data_ptr(), host.nbytes(), memory, stream);
    if (!place.is_same(to)) within(place, to, stream);
    if (!non_blocking) stream.synchronize();
  } else if (to.is_cpu()) {
    auto source = self;
    if (!is_like(self, to)) {
      auto like = at::empty(to.sizes(), to.options().device(c10::kMeta));
      within(self, source = on_device(like, device), stream);
    }
    auto host = is_like(source, to) ? to : at::empty(to.sizes(), to.options());
    to_host(host.data_ptr(), source.data_ptr(), host.nbytes(), memory, stream,
            non_blocking && host.is_same(to));
    if (!host.is_same(to)) to.copy_(host);
  } else {  // from one device to the other
    to.copy_(self.cpu());
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) {
    auto storage = to.storage();
    c10::OptionalDeviceGuard guard(to.device());
    storage.set_data_ptr_noswap(device_allocator.allocate(self.nbytes()));
    storage.set_nbytes(self.nbytes());
    to.unsafeGetTensorImpl()->set_sizes_contiguous(self.sizes());
  }
  return copy_from(self, to, false);
}

// -- the other operations -------------------------------------------------------------

at::Tensor make(at::IntArrayRef sizes, std::optional<at::IntArrayRef> strides,
                std::optional<at::ScalarType> dtype, std::optional<c10::Device> device,
                std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto type = dtype.value_or(at::kFloat);
  return strides ? at::detail::empty_strided_generic(sizes, *strides, &device_allocator, keys, type)
                 : at::detail::empty_generic(sizes, &device_allocator, keys, type, format);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return make(sizes, std::nullopt, dtype, device, format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return make(sizes, strides, dtype, device, std::nullopt);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  auto* block = static_cast<Block*>(self.storage().data_ptr().get_context());
  if (block) memory_of(self).use(block, &stream_of(stream));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_stream));
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

// -- for the tests, by ctypes -----------------------------------------------------------

extern "C" {

void fake_begin() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
void fake_set_delay(int microseconds) { fake::delay_us = microseconds; }
void fake_set_capacity(int device, size_t nbytes) {
  Machine::get().memory[device].set_capacity(nbytes);
}
void fake_empty_cache() {
  for (auto& memory : Machine::get().memory) memory.empty_cache();
}
void fake_forgive() { Machine::get().host.violations = 0; }
int fake_lock(uintptr_t at, size_t nbytes) { return Machine::get().host.lock(at, nbytes); }
int fake_unlock(uintptr_t at) { return Machine::get().host.unlock(at); }
void fake_figures(int device, bool resets_peak, int64_t* out) {
  auto found = Machine::get().memory[device].figures(resets_peak);
  memcpy(out, &found, sizeof(found));
}
void fake_host_figures(int64_t* out) { Machine::get().host.figures(out); }
void fake_busy(int microseconds) {
  current_stream(current_device).push([=] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  });
}
// Count, in the current stream, the words that are not the number of their row.
void fake_count(void* found, const void* batch, int64_t rows, int64_t words, int64_t row) {
  auto& memory = Machine::get().memory[current_device];
  auto* sum = reinterpret_cast<int64_t*>(memory.shadow(found));
  auto* at = reinterpret_cast<const int32_t*>(memory.shadow(batch));
  current_stream(current_device).push([=] {
    int64_t wrong = 0;
    for (int64_t at_row = 0; at_row < rows; ++at_row)
      for (int64_t word = 0; word < words; ++word)
        wrong += at[at_row * words + word] != row + at_row;
    *sum += wrong;
  });
}
void fake_capture(bool begins) { current_stream(current_device).is_capturing = begins; }

}  // extern "C"
