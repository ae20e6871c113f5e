"""Variants that change the scores.

alibi, bias, relative_bias
                what is added to them: a slope times the distance, an array, a learned table
softcap         a bound of their size
score_mod       any other change: `ScoreMod`, a function
"""
