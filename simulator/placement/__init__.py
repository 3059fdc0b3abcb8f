"""Simulates placement policies on routing traces, for `eaas trace`: PAR, transit, planning time, score."""
