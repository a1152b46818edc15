// A convolution as a product over taps, as its kernel takes it: plain values.
//
//   to[r][n] = sum over tap < taps, k of from[r + first_row + tap][k] * weight[tap][n][k]
//
// Channels are mixed in groups: k runs over the group that n is of. Rows that `from` does not have
// are zeros. Backward, a convolution is such a product too, of weights transposed and with their
// taps in reverse.
//
// Rows are numbered through the batch with room for the taps between its members, so that a tile's
// rows and those that its taps reach are neighbours wherever it lies: row n is row n % span of
// member n / span, span = rows + taps - 1, and the last taps - 1 of a member are rows of no result.
#pragma once

#include "layers/cuda/heads.cuh"

namespace fovea::layers::cuda {

struct TapBlock {
  int first = 0, channels = 0, group = 0;
  const void* weight = nullptr;  // [taps, channels, group]
  const void* bias = nullptr;    // [channels]
};

enum class Ending {
  kStore,   // to = product + bias
  kCouple,  // to = product + coupling
  kFinish,  // as Finish does
};

struct TapProduct {
  Rows from, to;
  int from_rows = 0, first_row = 0, taps = 1;
  int rows = 0, all_rows = 0;  // of `to`, of a batch member; and of all, spans and all
  Divider span;
  int blocks = 0;
  TapBlock block[2];
  Ending ending = Ending::kStore;
  Finish finish;  // of kCouple only the coupling

  // How tiles lie: those of the first block, which are the longer ones, come first.
  int tile_cols = 0;  // columns that a tile takes, whole heads where an ending asks for them
  int row_tiles = 0;
  int col_tiles[2] = {};

  void set_rows(int batch, int rows_of_member) {
    rows = rows_of_member;
    span = Divider(rows + taps - 1);
    all_rows = batch * (rows + taps - 1);
  }
};

}  // namespace fovea::layers::cuda
