"""Programs to be measured. They stand alone and run under any Python from 3.8 on.

Each does the same work in every run and prints `seconds S` as its last line: what its loop took, without
imports and without the first step.
"""
