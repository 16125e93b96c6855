-- "Running jobs": a time limit is required, and who has several accounts must name one.
function refused(job)
    if job.time_limit == slurm.NO_VAL then return "a time limit must be given" end
    if job.account == nil then return "one of several accounts must be given" end
end
