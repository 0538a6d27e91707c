"""The process we run in: several processes, progress, figures' look, other packages' noise."""
