# Tests of a build for races. ThreadSanitizer is told what orders the accesses of CUDA threads, bulk
# copies, products and puts to other nodes (races.h, products.cc, puts.cc), and ends the tests with
# status 66 if two accesses race. It knows no proxies, and so not the fences between ordinary
# accesses and bulk copies (.ci/check_sass.py checks those). For more than CI has time for:
#   EMULATED_GPUS=3 EMULATED_SMS=2 EMULATED_RESIDENT=2 build/races/calls_test 7 100
#   EMULATED_GPUS=4 EMULATED_SMS=1 EMULATED_RESIDENT=2 build/races/internode_test layers 7 50
# not `internode_test spoiled`: the test stores into windows that kernels read, and duplicate
# indices then make two warps store to one place.

# Inputs are the same in every run, so CI leaves out the part whose sources have not changed.
set(JAX_EP_RACES exchange matmuls CACHE STRING "which tests for races: of exchange, of matmuls")
set(OF_exchange kernels program calls calls_test options options_test internode_kernels internode
                internode_test window_kernels cpu_steps)
set(OF_matmuls matmuls matmul matmul_test portable mxfp4 mxfp4_test quantize_matrices
               quantize_matrices_test expert_row_kernels expert_rows expert_rows_test
               router_kernels router router_test)
foreach(PART IN ITEMS exchange matmuls)
  if(NOT PART IN_LIST JAX_EP_RACES)
    set_target_properties(${OF_${PART}} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endforeach()

if("exchange" IN_LIST JAX_EP_RACES)
# ThreadSanitizer has a limit of 8128 threads, which others exceed.
set(FEW_THREADS "EMULATED_SEED=1 EMULATED_RESIDENT=2")
emulated_test(races_calls "${FEW_THREADS} EMULATED_GPUS=3 EMULATED_SMS=2" calls_test 1 2)
emulated_test(races_options "${FEW_THREADS} EMULATED_GPUS=4 EMULATED_SMS=2" options_test 1 3)
# Over nodes: whole calls and halves, first halves that are never ended, and failures that signals
# report. With few threads, since each barrier costs their number squared.
set(OVER_NODES "${FEW_THREADS} EMULATED_GPUS=4 EMULATED_SMS=1")
emulated_test(races_internode_layers "${OVER_NODES}" internode_test layers 1 3)
foreach(ONLY IN ITEMS abandoned drops silent mixed)
  emulated_test(races_internode_${ONLY} "${OVER_NODES}" internode_test ${ONLY} 1 1)
endforeach()
# Waits that fail, in low-latency calls and in longer ones.
foreach(TOKENS IN ITEMS 5 25)
  wait_test(races_missing_${TOKENS} "EMULATED_RESIDENT=2 EMULATED_SMS=1 EMULATED_MISSING=1:4"
            ${TOKENS})
  set_property(TEST kernels_races_missing_${TOKENS}
               PROPERTY FAIL_REGULAR_EXPRESSION "ThreadSanitizer")
endforeach()

endif()

set(FEW_SMS "EMULATED_SEED=1 EMULATED_SMS=2")
if("matmuls" IN_LIST JAX_EP_RACES)
emulated_test(races_matmul "${FEW_SMS}" matmul_test 1 8)
emulated_test(races_mxfp4 "${FEW_SMS}" mxfp4_test 1 3)
emulated_test(races_quantize_matrices "${FEW_SMS} EMULATED_RESIDENT=4" quantize_matrices_test 1 1)
emulated_test(races_expert_rows "${FEW_SMS}" expert_rows_test 1 6)
emulated_test(races_router "${FEW_SMS}" router_test 1 20)
endif()

# Each makes an order disappear that nothing else may replace.
set(RACE "ThreadSanitizer: data race")
if("exchange" IN_LIST JAX_EP_RACES)
mutant(race_release common/signal_memory.cuh "FenceAcqRelSystem();" "" window/dispatch.cu "${RACE}"
       "2 7")
mutant(race_acquire common/signal_memory.cuh "LoadAcquireSystem(" "LoadRelaxedSystem("
       window/dispatch_cached.cu "${RACE}" "1 7")
mutant(race_last_of common/signal_memory.cuh "return FetchAddAcqRelGpu(counter, value);"
       "return FetchAdd(counter, value);" window/dispatch.cu "${RACE}" "1 7")
mutant(race_helpers window/team.cuh
       "work(static_cast<const TeamJob&>(*job_), reinterpret_cast<uint8_t*>(jobs_) + stage);"
       "const TeamJob job = *job_; ArriveAtBarrier(barrier_ + 1, LeaderAndHelpers());
        work(job, reinterpret_cast<uint8_t*>(jobs_) + stage); continue;"
       window/dispatch.cu "${RACE}" "2 7")
mutant(race_tables window/groups.cuh "team.Sync();\n    if (!arrived) return;"
       "if (!arrived) return;" low_latency/dispatch.cu "${RACE}" "1 7")
endif()

# ---- Of matmuls ----

if("matmuls" IN_LIST JAX_EP_RACES)

# What scales are read by, tiles, and the lines of a drain; who zeros what a copy has brought; and
# blocks that end while the other one still arrives.
mutant(race_portable_barrier portable/kernel.cuh
       "    AwaitCopies<kStages - 2>();
    __syncthreads();
    second" "    AwaitCopies<kStages - 2>();
    second" portable/wgrad.cu "${RACE}|not so: " "matmul portable_wgrad 1 6")
mutant(race_matmul_scales matmul/stages.cuh
       "    // Other lanes may still read scales, or miss the end of the phase that they wait for.
    __syncwarp();" "" matmul/fp8.cu "${RACE}" "matmul fp8_down_dgrad 1 12")
mutant(race_matmul_tiles matmul/scheduler.cuh "    if (HasGivenUp(ring_)) tile.k_blocks = -1;\n" ""
       matmul/wgrad.cu "${RACE}" "matmul wgrad 1 12")
mutant(race_matmul_drain matmul/drain.cuh
       "if (to.all) FenceProxyAsyncShared();\n    __syncwarp();" "if (to.all) FenceProxyAsyncShared();"
       matmul/fprop.cu "${RACE}|emulator: " "matmul fprop 1 12")
mutant(race_matmul_take matmul/drain.cuh "if (IsElected()) BulkWaitRead<kDrains - 1>();\n" ""
       matmul/fprop.cu "${RACE}|emulator: " "matmul fprop 1 12")
mutant(race_matmul_end matmul/kernel.cuh "  __syncwarp();\n  ClusterSync();\n}" "}"
       matmul/wgrad.cu "${RACE}|emulator: .*which has ended" "matmul wgrad 1 12")
endif()

# ---- Between nodes ----

if(NOT "exchange" IN_LIST JAX_EP_RACES)
  return()
endif()
set(FIXED "EMULATED_SEED=1 EMULATED_SMS=1 EMULATED_RESIDENT=2")
# Who waits for a signal's word; who passes cells on; whose threads read what one of them has
# settled.
mutant(race_internode_acquire protocol/internode.h "EpochsAhead(memory.Acquire(arrived), epoch)"
       "EpochsAhead(memory.Peek(arrived), epoch)" shmem/internode.cu "${RACE}" "internode layers 1 2")
mutant(race_internode_cells protocol/internode.h
       "memory.ReleaseFence();  // Release; pairs with Acquire in ObserveFlag." ""
       shmem/internode.cu "${RACE}" "internode layers 1 4")
mutant(race_internode_settled shmem/internode.cu "NVSHMEM_CMP_GE, 0);\n    __syncthreads();"
       "NVSHMEM_CMP_GE, 0);" shmem/internode.cu "${RACE}" "internode layers 2 2")
# Sources that store again into what puts may still read: after a credit that came before its puts
# were over, and one that was only looked at.
mutant(race_internode_credit shmem/internode.cu "} else if (!AwaitRegion({due, region, tag})) {"
       "} else if (false) {" shmem/internode.cu "${RACE}" "internode abandoned 1 4")
mutant(race_internode_reuse protocol/signals.h "ClassifyCredit(memory.Acquire(credit), lease)"
       "ClassifyCredit(memory.Peek(credit), lease)" window/dispatch_halves.cu "${RACE}"
       "internode layers 1 4")
