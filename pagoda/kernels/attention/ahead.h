// Asking for memory that will be read soon, a little at a time between pieces of arithmetic.
//
// Pages lie scattered: each is a miss of its own, and the hardware's prefetcher starts anew in each. A core waits for
// many more lines on their way into its second-level cache than into its first, so that is where they are asked to; and
// a few at a time, since a core that may ask for no more stands still, its arithmetic too. Two cores of a Zen 4 read
// pages of 2 KiB at 13 GB/s so on their own, at 22 asked for into the second level, 6 KiB at a time at 30, and memory in
// sequence at 32.
#pragma once

#include <cstdint>

class PagesAhead {
  public:
    void clear() {
        at_ = end_ = nullptr;
        next_ = count_ = 0;
    }
    void add(const void* begin, int64_t bytes) {
        if (bytes <= 0 || count_ == MOST) return;
        const char* from = static_cast<const char*>(begin);
        regions_[count_++] = {from, from + bytes};
    }
    // The next few lines.
    __attribute__((always_inline)) void ask() {
        if (at_ >= end_) {
            if (next_ == count_) return;
            at_ = regions_[next_].begin, end_ = regions_[next_].end, next_++;
        }
        for (int line = 0; line < LINES; line++) __builtin_prefetch(at_ + 64 * line, 0, 2);
        at_ += 64 * LINES;
    }
    void ask_rest() {
        while (at_ < end_ || next_ < count_) ask();
    }

  private:
    static constexpr int LINES = 4;
    static constexpr int MOST = 36;  // K, V and their scales of 64 positions in blocks of 8
    struct Region {
        const char *begin, *end;
    };
    Region regions_[MOST];
    const char *at_ = nullptr, *end_ = nullptr;
    int next_ = 0, count_ = 0;
};
