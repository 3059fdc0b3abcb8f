"""Simulates placement policies on routing traces: PAR, transit, planning time and score."""
