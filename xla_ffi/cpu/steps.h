// The CPU steps of the collective transport, and quantising alone. Each does its sequential part at
// once and returns the rest as a task; nothing blocks and nothing is kept between calls.
#pragma once

#include "cpu/row_task.h"
#include "protocol/steps.h"

namespace jax_ep::cpu {

template <typename Format>
RowTask DispatchPack(const DispatchPackStep& step);
template <typename Format>
RowTask DispatchUnpack(const DispatchUnpackStep& step);
template <typename Format>
RowTask DispatchCachedPack(const DispatchCachedPackStep& step);
template <typename Format>
RowTask DispatchCachedUnpack(const DispatchCachedUnpackStep& step);

// Turn rows into codes and scales, and back. For quantised formats only.
template <typename Format>
RowTask Quantize(const QuantizeStep& step);
template <typename Format>
RowTask Dequantize(const DequantizeStep& step);

RowTask CombinePack(const CombinePackStep& step);
RowTask CombineUnpack(const CombineUnpackStep& step);

}  // namespace jax_ep::cpu
