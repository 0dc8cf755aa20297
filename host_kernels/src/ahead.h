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
constexpr int64_t kMostLead = (int64_t{512} << 10) / kLineBytes;

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
  int64_t distance = 0;  // the lead that a scan keeps, in lines
  // What a step does.
  int64_t per_step = 0, limit = 0;
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
  a.distance = setting.distance / kLineBytes;
  if (a.distance > kMostLead) a.distance = kMostLead;
  a.lead = a.distance;
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

// Spreads the lines of a tile over so many steps of a scan.
static inline void pace_scan(Ahead& a, int64_t steps) {
  const int64_t lines = a.segments * a.segment;
  a.per_step = steps > 0 ? (lines + steps - 1) / steps : 0;
  a.limit = a.distance + lines;
}

// For work between scans: so many lines a step, as far ahead as there is room.
static inline void pace_other(Ahead& a, int64_t lines) {
  a.per_step = lines;
  a.limit = kMostLead;
}

static inline void step(Ahead& a) {
  if (a.hint == Hint::kNone) return;
  int64_t lines = a.per_step < a.limit - a.lead ? a.per_step : a.limit - a.lead;
  // What is far ahead would push out what the first-level cache is needed for.
  const Hint hint = a.lead > a.distance + a.segments * a.segment ? Hint::kT1 : a.hint;
  while (lines > 0 && a.tile < a.tiles) {
    const int64_t rest = a.segment - a.line, run = lines < rest ? lines : rest;
    prefetch_lines(hint, a.planes[a.plane] + (a.tile * a.segment + a.line) * kLineBytes, run);
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

// The scan has left a tile behind.
static inline void tile_done(Ahead& a) {
  a.lead -= a.segments * a.segment;
  if (a.lead < 0) a.lead = 0;
}

}  // namespace herald
