"""The spellings and the output files of perf_analyzer."""
