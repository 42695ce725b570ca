// The callbacks of -fsanitize=thread, and the shadow memory behind them. Compiled without that flag.
#define GRPO_EMULATOR_RACES 1
#include "cuda_emulator_races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace grpo_kernels::emulation::races {
namespace {

// One access. Epochs count launches, blocks and block barriers, all in one sequence; clocks count the warp barriers of
// a thread.
struct Stamp {
  std::uint32_t epoch = 0;
  std::uint32_t clock = 0;
  std::uint32_t place = 0;  // return address, counted from the start of the library
  std::uint16_t thread = 0;
  bool is_atomic = false;
};

// The last accesses to one byte. Two of its unordered reads are enough: a write that races with any of them races with
// one of the two, unless all are of one warp, whose lanes synchronise in groups. Kept are the reads of the lowest and
// the highest thread, which distinguishes the halves of a warp.
struct Cell {
  Stamp write;
  Stamp reads[2];
};

constexpr std::size_t kPageBytes = 1024;
struct Page {
  Cell cells[kPageBytes];
};

struct Race {
  bool is_write;
  bool was_write;
  unsigned bytes;
  std::uintptr_t address;
  Stamp now, before;
};

// The last __threadfence() of a thread.
struct Fence {
  std::uint32_t epoch = 0, clock = 0;
};

// An atomic operation, which releases what the fences of its block cover.
struct Release {
  std::uint32_t block_epoch, epoch;
  unsigned thread;
  std::vector<Fence> fences;
};

// An atomic operation of the current block, after the first `count` releases of its address.
struct Acquire {
  std::uint32_t epoch;
  unsigned thread;
  const std::vector<Release>* releases;
  std::size_t count;
};

constexpr std::size_t kMaxPages = 2048;  // 100 MB; cleared before a launch once there are more
constexpr std::size_t kMaxRaces = 20;    // in one report
constexpr unsigned kWarp = 32, kMaxThreads = 1024;
constexpr std::size_t kRecentPages = 1024;

struct Recent {
  std::uintptr_t number = ~std::uintptr_t{0};
  Page* page = nullptr;
};

bool recording = false, atomic = false;
unsigned current = 0;
std::uintptr_t stack_begin = 0;
std::size_t stack_bytes = 0;
std::uint32_t epoch = 0, launch_epoch = 0, block_epoch = 0;
std::uint32_t clocks[kMaxThreads][kWarp];  // by thread: the clock of each lane of its warp that it is ordered after

Fence fences[kMaxThreads];                                       // of the current block
std::unordered_map<const void*, std::vector<Release>> releases;  // of the launch, by address
std::vector<Acquire> acquires;                                   // of the current block

std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages;
Recent recent[kRecentPages];

const void* kernel = nullptr;
Range shared[2];
std::vector<Race> races_of_launch;
std::uintptr_t library = 0;  // where it is loaded

bool contains(const Range& range, std::uintptr_t address) {
  return address - reinterpret_cast<std::uintptr_t>(range.begin) < range.bytes;
}
bool is_shared(std::uintptr_t address) { return contains(shared[0], address) || contains(shared[1], address); }

// Whether an earlier block released that access before an atomic operation that the current thread follows.
bool is_acquired(const Stamp& before) {
  for (const Acquire& acquire : acquires) {
    if (acquire.thread != current && acquire.epoch >= epoch) continue;
    for (std::size_t i = 0; i < acquire.count; ++i) {
      const Release& release = (*acquire.releases)[i];
      if (before.epoch < release.block_epoch || before.epoch > release.epoch) continue;
      const Fence& fence = release.fences[before.thread];
      const bool is_fenced = before.epoch < fence.epoch || (before.epoch == fence.epoch && before.clock < fence.clock);
      if (is_fenced && (before.thread == release.thread || fence.epoch < release.epoch)) return true;
    }
  }
  return false;
}

// Whether the next access of the current thread follows that one in every schedule.
bool is_ordered(const Stamp& before, std::uintptr_t address) {
  if (before.epoch < launch_epoch) return true;
  if (before.epoch < block_epoch) return is_shared(address) || is_acquired(before);
  if (before.epoch < epoch || before.thread == current) return true;
  return before.thread / kWarp == current / kWarp && before.clock <= clocks[current][before.thread % kWarp];
}

void check(const Stamp& before, bool was_write, const Stamp& now, bool is_write, std::uintptr_t address,
           std::size_t bytes) {
  if ((before.is_atomic && now.is_atomic) || is_ordered(before, address)) return;
  for (const Race& race : races_of_launch) {
    if (race.now.place == now.place && race.before.place == before.place && race.was_write == was_write) return;
  }
  if (races_of_launch.size() == kMaxRaces) return;
  races_of_launch.push_back({is_write, was_write, static_cast<unsigned>(bytes), address, now, before});
}

void remember_read(Cell& cell, const Stamp& now, std::uintptr_t address) {
  for (Stamp& read : cell.reads) {
    // accesses ordered after this read are ordered after the earlier one; but atomics race only with plain accesses
    if (!is_ordered(read, address) || (now.is_atomic && !read.is_atomic && read.epoch >= launch_epoch)) continue;
    read = now;
    return;
  }
  Stamp& lowest = cell.reads[cell.reads[0].thread < cell.reads[1].thread ? 0 : 1];
  Stamp& highest = cell.reads[&lowest == &cell.reads[0] ? 1 : 0];
  if (now.thread < lowest.thread) {
    lowest = now;
  } else if (now.thread > highest.thread) {
    highest = now;
  }
}

Page& page_of(std::uintptr_t number) {
  Recent& slot = recent[number % kRecentPages];
  if (slot.number != number) {
    std::unique_ptr<Page>& page = pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    slot = {number, page.get()};
  }
  return *slot.page;
}

void access(const void* pointer, std::size_t bytes, bool is_write, const void* caller) {
  const auto first = reinterpret_cast<std::uintptr_t>(pointer);
  if (!recording || first - stack_begin < stack_bytes) return;  // a thread's stack is its own
  const auto place = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(caller) - library);
  const Stamp now{epoch, clocks[current][current % kWarp], place, static_cast<std::uint16_t>(current), atomic};
  for (std::uintptr_t address = first; address < first + bytes; ++address) {
    Cell& cell = page_of(address / kPageBytes).cells[address % kPageBytes];
    check(cell.write, true, now, is_write, address, bytes);
    if (is_write) {
      for (const Stamp& read : cell.reads) check(read, false, now, true, address, bytes);
      cell = {now, {}};
    } else {
      remember_read(cell, now, address);
    }
  }
}

std::string output_of(const std::string& command) {
  std::string text;
  std::FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char buffer[512];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) text += buffer;
  pclose(pipe);
  return text;
}

struct Frame {
  std::string function, source;
};

// The functions at an address of the library, from the innermost inlined one.
std::vector<Frame> frames_at(std::uintptr_t place) {
  Dl_info info;
  if (dladdr(&recording, &info) == 0) return {};
  char offset[32];
  std::snprintf(offset, sizeof(offset), "0x%zx", static_cast<std::size_t>(place));
  std::istringstream lines(
      output_of("addr2line -f -C -i -e '" + std::string(info.dli_fname) + "' " + offset + " 2>/dev/null"));
  std::vector<Frame> frames;
  for (Frame frame; std::getline(lines, frame.function) && std::getline(lines, frame.source);) frames.push_back(frame);
  return frames;
}

// Returns the line of an access; for an atomic, the kernel's line rather than the emulator's.
std::string source_of(const Stamp& stamp) {
  // the return address is the next instruction, which may be on another line
  for (const Frame& frame : frames_at(stamp.place - 1)) {
    const std::string file = frame.source.substr(frame.source.rfind('/') + 1);
    if (!file.starts_with("cuda_emulator")) return file.substr(0, file.find(' '));  // without a discriminator
  }
  return "an unknown line";
}

std::string kernel_name() {
  const std::vector<Frame> frames = frames_at(reinterpret_cast<std::uintptr_t>(kernel) - library);
  std::string name = frames.empty() ? "of an unknown name" : frames.back().function;
  const std::string unnamed = "(anonymous namespace)::";
  for (std::size_t at; (at = name.find(unnamed)) != std::string::npos;) name.erase(at, unnamed.size());
  name = name.substr(0, name.find('('));
  return name.starts_with("void ") ? name.substr(5) : name;
}

std::string describe(const Race& race) {
  const auto side = [](const Stamp& stamp, bool is_write) {
    return (stamp.is_atomic ? std::string("atomic ") : std::string()) + (is_write ? "write" : "read") + " at " +
           source_of(stamp) + " by thread " + std::to_string(stamp.thread) + " of a block";
  };
  return side(race.now, race.is_write) + " of " + std::to_string(race.bytes) + " bytes of " +
         (is_shared(race.address) ? "shared" : "global") + " memory, unordered with the " +
         side(race.before, race.was_write);
}

}  // namespace

void begin_launch(const void* function) {
  kernel = function;
  launch_epoch = ++epoch;
  releases.clear();
  races_of_launch.clear();
  if (library == 0) {
    Dl_info info;
    dladdr(&recording, &info);
    library = reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  }
  if (pages.size() > kMaxPages) {
    pages.clear();
    std::fill(std::begin(recent), std::end(recent), Recent{});
  }
}

void begin_block(Range static_shared, Range dynamic_shared) {
  block_epoch = ++epoch;
  shared[0] = static_shared;
  shared[1] = dynamic_shared;
  acquires.clear();
  std::fill(std::begin(fences), std::end(fences), Fence{});
  std::memset(clocks, 0, sizeof(clocks));
  for (unsigned thread = 0; thread < kMaxThreads; ++thread) clocks[thread][thread % kWarp] = 1;
}

std::string end_launch() {
  if (races_of_launch.empty()) return {};
  std::string text = "race in kernel " + kernel_name() + ":";
  for (const Race& race : races_of_launch) text += "\n  " + describe(race);
  races_of_launch.clear();
  return text;
}

void set_thread(unsigned thread, Range stack) {
  current = thread;
  stack_begin = reinterpret_cast<std::uintptr_t>(stack.begin);
  stack_bytes = stack.bytes;
}

void block_barrier() { ++epoch; }

// Orders every lane after everything that any lane of the group has done or is ordered after.
void warp_barrier(unsigned first_thread, std::uint32_t lanes) {
  std::uint32_t latest[kWarp] = {};
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    for (unsigned i = 0; i < kWarp; ++i) latest[i] = std::max(latest[i], clocks[first_thread + lane][i]);
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    std::copy(std::begin(latest), std::end(latest), clocks[first_thread + lane]);
    ++clocks[first_thread + lane][lane];
  }
}

void fence() { fences[current] = {epoch, ++clocks[current][current % kWarp]}; }

void atomic_operation(const void* address) {
  if (fences[current].epoch == 0) return;  // neither releases nor acquires anything
  std::vector<Release>& earlier = releases[address];
  acquires.push_back({epoch, current, &earlier, earlier.size()});
  earlier.push_back({block_epoch, epoch, current, {std::begin(fences), std::end(fences)}});
}

void set_recording(bool value) { recording = value; }
void set_atomic(bool value) { atomic = value; }

}  // namespace grpo_kernels::emulation::races

#define GRPO_CALLBACK extern "C" __attribute__((visibility("hidden"))) void
#define GRPO_ACCESS(name, bytes, is_write)                                                         \
  GRPO_CALLBACK name(void* address) {                                                              \
    grpo_kernels::emulation::races::access(address, bytes, is_write, __builtin_return_address(0)); \
  }
#define GRPO_ACCESSES(bytes)                              \
  GRPO_ACCESS(__tsan_read##bytes, bytes, false)           \
  GRPO_ACCESS(__tsan_write##bytes, bytes, true)           \
  GRPO_ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
  GRPO_ACCESS(__tsan_unaligned_write##bytes, bytes, true)
GRPO_ACCESSES(1)
GRPO_ACCESSES(2)
GRPO_ACCESSES(4)
GRPO_ACCESSES(8)
GRPO_ACCESSES(16)
GRPO_CALLBACK __tsan_read_range(void* address, std::size_t bytes) {
  grpo_kernels::emulation::races::access(address, bytes, false, __builtin_return_address(0));
}
GRPO_CALLBACK __tsan_write_range(void* address, std::size_t bytes) {
  grpo_kernels::emulation::races::access(address, bytes, true, __builtin_return_address(0));
}
GRPO_CALLBACK __tsan_init() {}
GRPO_CALLBACK __tsan_vptr_update(void*, void*) {}
// Called by the C++ library in host code: reference counts, and the initialisation of local static variables.
extern "C" __attribute__((visibility("hidden"))) int __tsan_atomic32_fetch_add(int* address, int value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
extern "C" __attribute__((visibility("hidden"))) char __tsan_atomic8_load(const char* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
