// `await` of kernels/signalling.cuh on a CPU: a warp is 32 threads, and its votes are rounds in which all of them vote for
// the same thing. test_await_on_host.py puts the kernel's own text where the line below says so.
//
// Prints the runs and how many went wrong; a warp that diverges or hangs ends the program with an error.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
#define WORLD 4
#define ABORT 28
#define ABORT_WORDS 8
#define TIMEOUT 2
constexpr u32 ALL = 0xFFFFFFFFu;

struct Index {
  int x;
};
thread_local Index threadIdx;

enum Vote { ANY, BALLOT, SYNC };

u32 vote(Vote vote, bool mine) {
  static std::mutex mutex;
  static std::condition_variable change;
  static int arrived = 0;
  static long round = 0;
  static u32 votes = 0, result = 0;
  static Vote current = SYNC;
  std::unique_lock<std::mutex> lock(mutex);
  if (arrived == 0) current = vote, votes = 0;
  if (current != vote) std::printf("diverged\n"), std::_Exit(1);
  if (mine) votes |= 1u << threadIdx.x;
  const long now = round;
  if (++arrived == 32) {
    result = votes, arrived = 0, ++round;
    change.notify_all();
  } else if (!change.wait_for(lock, std::chrono::seconds(20), [&] { return round != now; })) {
    std::printf("hangs\n"), std::_Exit(1);
  }
  return result;
}

inline bool __any_sync(u32, bool mine) { return vote(ANY, mine) != 0; }
inline u32 __ballot_sync(u32, bool mine) { return vote(BALLOT, mine); }
inline void __syncwarp() { vote(SYNC, false); }
inline int __ffs(u32 bits) { return __builtin_ffs(bits); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline int load_acquire(const int* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline int load_relaxed(const int* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_relaxed(int* at, int value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
inline void store_release(int* at, int value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline int atomicCAS(int* at, int expected, int value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
inline long long clock_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// THE TEXT OF signalling.cuh

// PARTLY: peers 0 and 3, the latter late, tell of a part, the others raise no such word, but the flag. LONG_AGO: the word
// of peer 3 is of an epoch before the wrap, from where it seems to be ahead, and its flag does not come.
enum Case { ALL_HERE, ONE_COMES, PARTLY, ONE_FAILS_AND_COMES, ONE_FAILS, NONE_COMES, FAILED_BEFORE, LONG_AGO };

int words[WORLD][128], error[8], latch;

// Whether `await` answered what it must.
bool run(Case what, int number) {
  const int epoch = 5, phase = 3, code = 7;
  u64 signals[WORLD];
  for (int rank = 0; rank < WORLD; ++rank) signals[rank] = reinterpret_cast<u64>(words[rank]);
  std::memset(words, 0, sizeof words), std::memset(error, 0, sizeof error);
  latch = what == FAILED_BEFORE ? code : 0;
  int *own = words[0], *flags = own + (epoch & 1) * WORLD, *progress = own + 64;
  const bool early = what == PARTLY || what == LONG_AGO;
  const int here = what == ALL_HERE ? WORLD : what == NONE_COMES || what == FAILED_BEFORE ? 0 : WORLD - 1;
  for (int peer = 0; peer < here; ++peer) (what == PARTLY && peer == 0 ? progress : flags)[peer] = epoch;
  if (what == ALL_HERE) flags[1] = epoch + 2;
  if (what == LONG_AGO) progress[3] = epoch + 1000000000;
  std::thread last_peer([&] {
    for (volatile int turn = 0; turn < number % 97 * 50;) turn = turn + 1;
    if (what == ONE_FAILS_AND_COMES || what == ONE_FAILS) store_release(own + ABORT + 3 * ABORT_WORDS, code);
    if (what == ONE_FAILS_AND_COMES || what == ONE_COMES) store_release(flags + 3, epoch);
    if (what == PARTLY) store_release(progress + 3, epoch);
  });
  const Exchange x{signals, error, &latch, 0, what == NONE_COMES || what == LONG_AGO ? 3000000ll : 10000000000ll};
  bool failed[32];
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane)
    warp.emplace_back([&, lane] {
      threadIdx.x = lane;
      const int peer = lane < WORLD ? lane : WORLD - 1, *flag = flags + peer, *word = early ? progress + peer : flag;
      failed[lane] = await(x, own, lane < WORLD, word, epoch, flag, epoch, phase, epoch, early);
    });
  for (std::thread& lane : warp) lane.join();
  last_peer.join();
  for (bool answer : failed)
    if (answer != (what >= ONE_FAILS_AND_COMES)) return false;
  // Threads of a CPU read the clock one after the other, so any of them may be the first that is late.
  if (what == LONG_AGO) return latch == TIMEOUT && error[0] == TIMEOUT && error[1] == 3 && error[2] == phase;
  if (what == NONE_COMES)
    return latch == TIMEOUT && error[0] == TIMEOUT && error[1] >= 0 && error[1] < WORLD && error[2] == phase;
  return latch == (what >= ONE_FAILS_AND_COMES ? code : 0);
}

int main() {
  int runs = 0, wrong = 0;
  for (Case what : {ALL_HERE, ONE_COMES, PARTLY, ONE_FAILS_AND_COMES, ONE_FAILS, NONE_COMES, FAILED_BEFORE, LONG_AGO})
    for (int number = 0; number < (what == ONE_FAILS_AND_COMES ? 1200 : 60); ++number, ++runs)
      if (!run(what, number)) std::printf("case %d wrong\n", what), ++wrong;
  std::printf("%d runs, %d wrong\n", runs, wrong);
  return wrong != 0;
}
