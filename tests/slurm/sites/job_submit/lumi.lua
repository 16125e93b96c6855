-- "Invalid account or account/partition combination": both must be given. More than 56 cores of a node
-- of standard-g are never had.
function refused(job)
    if job.partition == nil or job.account == nil then return "an account and a partition must be given" end
    if job.partition == "standard-g" and job.ntasks_per_node * job.cpus_per_task > 56 then
        return "a node has 56 cores for jobs"
    end
end
