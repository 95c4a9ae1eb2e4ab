# Tests of a build for races. ThreadSanitizer, which is told what orders the accesses of CUDA threads
# and bulk copies (races.h), ends them with status 66 where two race. It knows of no proxies, so not
# of the fences between ordinary accesses and bulk copies (.ci/check_sass.py looks at those), and
# sees nothing of puts. For more than CI has time for:
#   EMULATED_GPUS=3 EMULATED_SMS=2 EMULATED_RESIDENT=2 build/races/calls_test 7 100
set_target_properties(far_calls far_calls_test PROPERTIES EXCLUDE_FROM_ALL ON)
set(FEW_THREADS "EMULATED_SEED=1 EMULATED_RESIDENT=2")
emulated_test(races_calls "${FEW_THREADS} EMULATED_GPUS=3 EMULATED_SMS=2" calls_test 1 3)
emulated_test(races_options "${FEW_THREADS} EMULATED_GPUS=4 EMULATED_SMS=2" options_test 1 5)
# Waits that fail, of few tokens and of more.
foreach(TOKENS IN ITEMS 5 40)
  wait_test(races_missing_${TOKENS} "EMULATED_RESIDENT=2 EMULATED_SMS=1 EMULATED_MISSING=1:4"
            ${TOKENS})
  set_property(TEST kernels_races_missing_${TOKENS}
               PROPERTY FAIL_REGULAR_EXPRESSION "ThreadSanitizer")
endforeach()

# Each makes an order disappear that nothing else may replace.
set(RACE "ThreadSanitizer: data race")
mutant(race_release signal_memory.cuh "FenceAcqRelSystem();" "" window_dispatch.cu "${RACE}" "1 7")
mutant(race_acquire signal_memory.cuh "LoadAcquireSystem(" "LoadRelaxedSystem("
       window_cached_dispatch.cu "${RACE}" "1 7")
mutant(race_last_of signal_memory.cuh "return FetchAddAcqRelGpu(counter, value);"
       "return FetchAdd(counter, value);" window_dispatch.cu "${RACE}" "1 7")
mutant(race_helpers window_team.cuh
       "work(static_cast<const TeamJob&>(*job_), reinterpret_cast<uint8_t*>(jobs_) + stage);"
       "const TeamJob job = *job_; ArriveAtBarrier(barrier_ + 1, LeaderAndHelpers());
        work(job, reinterpret_cast<uint8_t*>(jobs_) + stage); continue;"
       window_dispatch.cu "${RACE}" "1 7")
mutant(race_tables window_groups.cuh "team.Sync();\n    if (!arrived) return;"
       "if (!arrived) return;" window_few_dispatch.cu "${RACE}" "1 7")
