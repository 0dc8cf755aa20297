// Asks for memory in step with the work on it. A core can wait for a dozen lines at a time, so
// lines asked for in one burst stop it, and while it computes without asking, memory idles: both
// must run side by side, line by line.
//
// Functions are static, because kernels of several instruction sets include them; see table-inl.h.
#pragma once

#include <cstdint>

#include "prefetch.h"

namespace herald {

constexpr int64_t kLineBytes = 64;
// How far ahead at most: a part of the second-level cache, beyond which lines would be gone again.
constexpr int64_t kMostLead = (int64_t{256} << 10) / kLineBytes;

// Runs over the tiles of a head, the keys of a tile and then its values, ahead of the scan. As
// initialised it asks for nothing.
struct Ahead {
  Hint hint = Hint::kNone;
  const char* planes[2] = {};  // keys, values
  int64_t segment = 0;         // lines of a tile in one plane
  int64_t segments = 1;        // planes in use
  int64_t tiles = 0;
  // The next line to ask for, and how many lines the scan's tile begins before it.
  int64_t tile = 0, plane = 0, line = 0, lead = 0;
  int64_t per_step = 0;
};

// `values` may be null. `tiles` tiles of `bytes`, a multiple of a line, follow one another.
static inline Ahead look_ahead(const Prefetch& setting, const char* keys, const char* values,
                               int64_t bytes, int64_t tiles) {
  Ahead a;
  a.hint = setting.hint;
  a.planes[0] = keys;
  a.planes[1] = values;
  a.segment = bytes / kLineBytes;
  a.segments = values ? 2 : 1;
  a.tiles = tiles;
  if (a.hint == Hint::kNone) return a;
  // The first lines are read before they could be asked for.
  a.lead = setting.distance / kLineBytes;
  if (a.lead > kMostLead) a.lead = kMostLead;
  a.tile = a.lead / a.segment / a.segments;
  a.plane = a.lead / a.segment % a.segments;
  a.line = a.lead % a.segment;
  return a;
}

static inline void prefetch_lines(Hint hint, const char* from, int64_t lines) {
  const char* end = from + lines * kLineBytes;
  if (hint == Hint::kT0)
    for (; from < end; from += kLineBytes) __builtin_prefetch(from, 0, 3);
  else if (hint == Hint::kT1)
    for (; from < end; from += kLineBytes) __builtin_prefetch(from, 0, 2);
  else
    for (; from < end; from += kLineBytes) __builtin_prefetch(from, 0, 0);
}

// Asks for so many lines, or as many as the lead allows.
static inline void ask(Ahead& a, int64_t lines) {
  if (a.hint == Hint::kNone) return;
  if (lines > kMostLead - a.lead) lines = kMostLead - a.lead;
  while (lines > 0 && a.tile < a.tiles) {
    const int64_t rest = a.segment - a.line, run = lines < rest ? lines : rest;
    prefetch_lines(a.hint, a.planes[a.plane] + (a.tile * a.segment + a.line) * kLineBytes, run);
    a.lead += run;
    a.line += run;
    lines -= run;
    if (a.line < a.segment) return;
    a.line = 0;
    if (++a.plane < a.segments) continue;
    a.plane = 0;
    ++a.tile;
  }
}

// Spreads the lines of a tile over so many calls of step().
static inline void spread(Ahead& a, int64_t calls) {
  a.per_step = calls > 0 ? (a.segments * a.segment + calls - 1) / calls : 0;
}

static inline void step(Ahead& a) { ask(a, a.per_step); }

// The scan has left a tile behind.
static inline void tile_done(Ahead& a) {
  a.lead -= a.segments * a.segment;
  if (a.lead < 0) a.lead = 0;
}

}  // namespace herald
