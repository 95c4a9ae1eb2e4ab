// The custom-call targets that native modules register.
#pragma once

#include <vector>

#include "ffi/collective_calls.h"
#include "ffi/matmul_calls.h"
#include "ffi/router_calls.h"
#include "ffi/row_calls.h"
#include "ffi/window_calls.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::ffi_layer {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
  XLA_FFI_Handler* initialize = nullptr;  // for XLA's stage of that name, if any
};

template <typename... Calls>
struct CallList {};
// Served by every module.
using StepCalls =
    CallList<DispatchPackCall, DispatchUnpackCall, DispatchCachedPackCall, DispatchCachedUnpackCall,
             CombinePackCall, CombineUnpackCall, QuantizeCall, DequantizeCall>;
// Served by the CUDA module only.
using WindowCalls = CallList<DispatchCall, DispatchCachedCall, CombineCall, DispatchSendCall,
                             DispatchRecvCall, CombineSendCall, CombineRecvCall>;
using OnStreamCalls = CallList<DispatchSendOnStreamCall, CombineSendOnStreamCall>;
using RowCalls = CallList<CombineBackCall, QuantizeCotangentsCall, DequantizeRowsCall>;
using RouterCalls = CallList<RouterCall>;
using MatmulCalls =
    CallList<FpropCall, DgradCall, GateUpCall, DownDgradCall, WgradCall, Fp8FpropCall, Fp8DgradCall,
             PortableFpropCall, PortableDgradCall, PortableGateUpCall, PortableDownDgradCall,
             PortableWgradCall, Fp8GateUpCall, Fp8DownDgradCall, ExpertsCall, Fp8ExpertsCall,
             Mxfp4FpropCall, Mxfp4GateUpCall, QuantizeMatricesCall, Fp8OfMxfp4Call, Fp8WgradCall,
             TransposeRowsCall, TransposeCodesCall>;

// Calls `visit.template operator()<Call>()` for each.
template <typename... Calls, typename Visit>
void ForEachCall(CallList<Calls...>, Visit visit) {
  (visit.template operator()<Calls>(), ...);
}

// `handler_of.template operator()<Call>()` is a back end's handler of that call.
template <typename Calls, typename HandlerOf>
void AddTargets(std::vector<Target>& targets, Calls calls, HandlerOf handler_of) {
  ForEachCall(calls, [&]<typename Call>() {
    targets.push_back({Call::kTarget, handler_of.template operator()<Call>()});
  });
}

}  // namespace jax_ep::ffi_layer
