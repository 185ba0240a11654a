"""The second oracles: NumPy longhand, one chapter per file, sharing no code with reference/.

Nothing here is vectorised and nothing is differentiated by a library: every sum is a written loop and every
gradient a formula worked out by hand, so that agreement with reference/ is evidence and not an echo.
"""
